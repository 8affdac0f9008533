"""The fence file: one epoch per grant slot, guarded by an OFD lock on the slot's own bytes.

    byte 0            owner lock (files.py)
    0 .. 1023         header: magic, version, slots, incarnation word, incarnation text
    1024 .. 4095      who copies by GPU (cuda_ipc/writers.py)
    4096 + 64 * i     slot i: u64 epoch, u64 dying (the epoch the owner is revoking), padding

A writer holds its slot *shared* for one bounded batch and believes only the epoch it reads while
holding it; several ranks of one grant may write side by side. The owner revokes by taking the slot
*exclusively* and adding one to the epoch: then no holder is left and every later one sees the new
epoch. That is the whole proof. `dying` and the incarnation word only make a writer stop earlier.

A stopped writer keeps its lock (so the blocks stay quarantined); a dead one loses it in the kernel.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

from pullfill.errors import ConfigError, Fenced, OverloadedError, PeerUnavailable, TransferFailed
from pullfill.runtime import failpoints
from pullfill.transfer.copying import corrupt
from pullfill.transfer.shm import lock
from pullfill.wire import FenceToken

SLOTS = 4096
_MAGIC = b"pfFENCE1"
_HEADER = struct.Struct("<8sQQ128s")  # magic, slots, incarnation word, incarnation text
_HEADER_BYTES = 4096
_SLOT_BYTES = 64
_WORD = 8
_INCARNATION_AT = 2  # index of the word in units of u64
_LOCK_PATIENCE_S = 1.0
_SLOTS_KEPT = 64

_Slot: TypeAlias = tuple[int, lock.Call, lock.Call]
"""Index of the epoch's word; lock and unlock, see `lock.shared`."""


def incarnation_word(incarnation: str) -> int:
    """64 bits of the incarnation, never 0 (0 = closed): one aligned load per batch."""
    return int.from_bytes(blake2b(incarnation.encode(), digest_size=8).digest()) | 1


def _slot_at(slot: int) -> int:
    return _HEADER_BYTES + slot * _SLOT_BYTES


class ShmFences:
    """OwnerFences over a fence file. Borrows `fd` (RegionFiles owns it); owns its mapping.

    Thread-safe. A slot goes back to the free list only by a proved revoke, and its epoch only
    grows, so an old token never fits a slot used again.
    """

    def __init__(self, fd: int, incarnation: str, num_blocks: int, slots: int = SLOTS) -> None:
        os.ftruncate(fd, _slot_at(slots))
        self._fd = fd
        self._num_blocks = num_blocks
        self._slots = slots
        self._map = mmap.mmap(fd, _slot_at(slots))
        self._words = memoryview(self._map).cast("Q")
        self._free = [*reversed(range(slots))]  # last in, first out: what is kept of a slot is used
        self._mutex = threading.Lock()
        self._closed = False
        self.quiet: Callable[[int], bool] | None = None
        """For writers whose bytes move on after they lost their lock (cuda_ipc/writers.py): asked
        with the slot locked; False: not proved yet. Set it before the first `open`."""
        for slot in range(slots):
            self._words[_slot_at(slot) // _WORD] = secrets.randbits(61)
        self.renew(incarnation)

    def renew(self, incarnation: str) -> None:
        """A new incarnation: sessions opened under the old one are refused from now on. What
        they do in a batch under way is ended by `try_revoke` of their tokens as always."""
        text = incarnation.encode()
        if len(text) > 128:
            raise ConfigError("an incarnation has at most 128 bytes")
        with self._mutex:
            # The word first: a session that connects half-way finds text and word apart.
            self._words[_INCARNATION_AT] = incarnation_word(incarnation)
            _HEADER.pack_into(
                self._map, 0, _MAGIC, self._slots, incarnation_word(incarnation), text
            )

    @property
    def in_use(self) -> int:
        """Slots open or being revoked."""
        return self._slots - len(self._free)

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        """See OwnerFences. The file knows nothing of blocks: who maps the memory can write to all
        of it. Raises OverloadedError when all slots are in use, ConfigError on block ids outside
        the region."""
        if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ConfigError(f"a granted block is outside 0..{self._num_blocks - 1}")
        with self._mutex:
            if self._closed:
                raise ConfigError("the region is closed")
            if not self._free:
                raise OverloadedError(f"all {self._slots} fence slots are in use")
            slot = self._free.pop()
            return FenceToken(slot=slot, epoch=self._words[_slot_at(slot) // _WORD])

    def try_revoke(self, token: FenceToken) -> bool:
        """See OwnerFences. Two system calls, never blocks."""
        if token.slot >= self._slots:
            raise ConfigError(f"no fence slot {token.slot}")
        start = _slot_at(token.slot)
        word = start // _WORD
        with self._mutex:
            if self._closed:
                raise ConfigError("the region is closed: nothing can be proved any more")
            if self._words[word] != token.epoch:
                return True
            self._words[word + 1] = token.epoch
            if not lock.try_exclusive(self._fd, start, _SLOT_BYTES):
                return False
            try:
                if self.quiet is not None and not self.quiet(token.slot):
                    return False
                self._words[word] = token.epoch + 1
            finally:
                lock.unlock(self._fd, start, _SLOT_BYTES)
            self._free.append(token.slot)
            return True

    def close(self) -> None:
        """Refuse every session's next batch and drop the mapping. Idempotent. Proves nothing:
        revoke what must be proved before."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._words[_INCARNATION_AT] = 0
            self._words.release()
            self._map.close()


class ShmHold:
    """The peer's end of a fence file; a `session.Gate`. Owns `fd`, an open file description of
    its own, so that its locks are its own too."""

    def __init__(self, fd: int, incarnation: str) -> None:
        """Raises PeerUnavailable when the file is of another incarnation or not a fence file.
        Takes ownership of `fd` in every case."""
        self._fd = fd
        self._word = incarnation_word(incarnation)
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, _HEADER.size, 0)
            if len(head) < _HEADER.size:
                raise PeerUnavailable("the fence file is not ready")
            magic, slots, word, text = _HEADER.unpack(head)
            if magic != _MAGIC or size != _slot_at(slots):
                raise PeerUnavailable("the fence file is damaged or of another version")
            if word != self._word or text.rstrip(b"\0") != incarnation.encode():
                raise PeerUnavailable("the region belongs to another incarnation of its owner")
            self._slots = slots
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        self._words = memoryview(self._map).cast("Q")
        self._slots_used: dict[int, _Slot] = {}

    def enter(self, token: FenceToken, wait: bool = True) -> bool:
        word, take, _ = self._slots_used.get(token.slot) or self._prepare(token)
        words, epoch = self._words, token.epoch
        if words[word + 1] == epoch:
            raise Fenced("the grant is being revoked")
        if lock.call(*take):
            if not wait:
                return False
            self._wait_shared(word, token)
        if words[word] != epoch or words[_INCARNATION_AT] != self._word:
            self.leave(token)
            raise Fenced("the grant was revoked")
        return True

    def _prepare(self, token: FenceToken) -> _Slot:
        """Kept, because a write is many batches of one slot; not for ever, because a session sees
        many slots. Raises Fenced when there is no such slot."""
        if token.slot >= self._slots:
            raise Fenced(f"the owner has no fence slot {token.slot}")
        if len(self._slots_used) >= _SLOTS_KEPT:
            self._slots_used.clear()
        start = _slot_at(token.slot)
        slot = start // _WORD, *lock.shared(self._fd, start, _SLOT_BYTES)
        self._slots_used[token.slot] = slot
        return slot

    def _wait_shared(self, word: int, token: FenceToken) -> None:
        """The owner holds the slot: for microseconds, unless it is stopped right there."""
        give_up = time.monotonic() + _LOCK_PATIENCE_S
        while not lock.try_shared(self._fd, word * _WORD, _SLOT_BYTES):
            if time.monotonic() >= give_up:
                raise TransferFailed("the owner holds the fence and does not let go")
            time.sleep(50e-6)
            if self._words[word + 1] == token.epoch:
                raise Fenced("the grant is being revoked")

    def leave(self, token: FenceToken) -> None:
        _, _, give = self._slots_used.get(token.slot) or self._prepare(token)
        if lock.call(*give):
            lock.unlock(self._fd, _slot_at(token.slot), _SLOT_BYTES)

    def before_batch(self, verb: str) -> None:
        failpoints.hit(f"shm.{verb}.before_batch")

    def inside_batch(self, verb: str) -> None:
        failpoints.hit(f"shm.{verb}.batch")

    def copied(self, verb: str, address: int) -> None:
        if failpoints.hit(f"shm.{verb}.corrupt"):
            corrupt(address)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._fd)
