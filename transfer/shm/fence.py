"""The fence file: a slot for each grant, with an epoch, guarded by an OFD lock on the slot's bytes.

byte 0            owner lock (files.py)
0 .. 1023         header: magic, slots, incarnation word, incarnation text
1024 .. 4095      who copies by GPU (cuda_ipc/writers.py)
4096 + 64 * i     slot i: u64 epoch, u64 dying (the epoch the owner is revoking), padding
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

from pullfill.errors import ConfigError, Fenced, OverloadedError, PeerUnavailable, TransferFailed
from pullfill.runtime import log
from pullfill.transfer.cuda_ipc import writers
from pullfill.transfer.shm import lock
from pullfill.wire import FenceToken

logger = log.get("transfer")

# Whoever copies, in any transport, locks the slot *shared* for one bounded batch. It believes only
# the epoch that it reads while it holds the lock. Several ranks may copy under one grant at once.
#
# The owner revokes: it locks the slot *exclusively* and adds one to the epoch. Then nobody else
# holds the lock, and everybody who takes it later sees the new epoch. That is the whole proof.
# `dying` and the incarnation word only make a writer stop earlier.
#
# A stopped writer keeps its lock, so its blocks stay in quarantine. A dead one loses it in the
# kernel.

SLOTS = 4096
# A writer waits at most so long for a slot that the owner holds and says nothing about.
PATIENCE_S = 1.0
_MAGIC = b"pfFENCE1"
_HEADER = struct.Struct("<8sQQ128s")  # magic, slots, incarnation word, incarnation text
_HEADER_BYTES = 4096
_SLOT_BYTES = 64
_WORD = 8
_INCARNATION_AT = 2  # index of the word in units of u64


def incarnation_word(incarnation: str) -> int:
    """64 bits of a hash of the incarnation: one aligned load per batch. Never 0: 0 means closed."""
    return int.from_bytes(blake2b(incarnation.encode(), digest_size=8).digest()) | 1


def _slot_at(slot: int) -> int:
    return _HEADER_BYTES + slot * _SLOT_BYTES


class ShmFences:
    """The owner's side. Each fence covers the regions of all its ranks. Thread-safe.

    Owns a mapping of the file; RegionFiles owns `fd`. Only a proved revoke makes a slot free, and
    its epoch only grows. So an old token never fits a slot that is used again.

    hurry: called after a revoke that proved nothing. One of our own threads may hold the fence and
    wait for a peer.
    """

    def __init__(self, fd: int, incarnation: str, slots: int = SLOTS) -> None:
        os.ftruncate(fd, _slot_at(slots))
        self._fd = fd
        self._slots = slots
        self._map = mmap.mmap(fd, _slot_at(slots))
        self._words = memoryview(self._map).cast("Q")
        self._free = [*range(slots)]
        self._mutex = threading.Lock()
        self._closed = False
        self.hurry: Callable[[FenceToken], object] = lambda _token: None
        # By slot: the epoch, the blocks, and from which on they may be written.
        self._granted: dict[int, tuple[int, Sequence[int], int]] = {}
        for slot in range(slots):
            self._words[_slot_at(slot) // _WORD] = secrets.randbits(61)
        word, text = incarnation_word(incarnation), incarnation.encode()
        _HEADER.pack_into(self._map, 0, _MAGIC, slots, word, text)

    @property
    def in_use(self) -> int:
        """Slots not free: open, or dying and not yet proved."""
        return self._slots - len(self._free)

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        """Open a fence. It is valid from now on.

        block_ids: what may be read. Must not be changed afterwards.
        first_target: `block_ids[first_target:]` may also be written.

        Raises OverloadedError when all slots are in use."""
        # A transport whose owner moves the bytes refuses every other block: its threads ask
        # `granted`. Where the peer maps the memory (shm, cuda_ipc), the peer is trusted to keep to
        # its grant. Whoever copies checks that blocks are in the region.
        with self._mutex:
            if self._closed:
                raise ConfigError("the region is closed")
            if not self._free:
                raise OverloadedError(f"all {self._slots} fence slots are in use")
            slot = self._free.pop()
            token = FenceToken(slot=slot, epoch=self._words[_slot_at(slot) // _WORD])
            self._granted[slot] = token.epoch, block_ids, first_target
            return token

    def granted(self, token: FenceToken, *, writes: bool) -> Sequence[int] | None:
        """Return the blocks that the token grants. None if the token is revoked, or is of another
        process.

        writes: return only those that may be written."""
        epoch, blocks, first_target = self._granted.get(token.slot, (None, (), 0))
        if epoch != token.epoch:
            return None
        return blocks[first_target:] if writes else blocks

    def open_hold(self, incarnation: str) -> ShmHold:
        """For a thread of this process that receives or sends for a peer. The caller owns it.
        Raises PeerUnavailable when the peer knows another incarnation, and OSError."""
        with self._mutex:
            if self._closed:  # the number may be that of another file by now
                raise PeerUnavailable("the region is closed")
            # Opened anew, so that its locks are its own.
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        return ShmHold(fd, incarnation)

    def try_revoke(self, token: FenceToken) -> bool:
        """Invalidate the fence. Idempotent. Two system calls, never blocks.

        True: it is proved that nothing can land any more. The slot is free for reuse.
        False: a batch of the writer is under way, or the writer's process is stopped. Where the
        transport can, it refuses every new batch already. Or the kernel has no memory for a lock,
        which is logged. The caller asks again.

        Every token ends this way, committed ones too. That frees the slot."""
        try:
            if self._revoke(token):
                return True
        except OSError:
            logger.exception("cannot ask for the proof that a peer is quiet; asking again soon")
        self.hurry(token)
        return False

    def _revoke(self, token: FenceToken) -> bool:
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
                if not writers.quiet(self._words, token.slot):
                    return False
                self._words[word] = token.epoch + 1
            finally:
                lock.unlock(self._fd, start, _SLOT_BYTES)
            self._granted.pop(token.slot, None)
            self._free.append(token.slot)
            return True

    def close(self) -> None:
        """Refuse every session's next batch. Proves nothing. Afterwards `open` and `try_revoke`
        raise ConfigError. Idempotent."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._words[_INCARNATION_AT] = 0
            self._words.release()
            self._map.close()


class ShmHold:
    """Holds a fence while one batch is copied. One object serves all fences of one owner.

    Owns `fd`, an open file description with its own locks."""

    def __init__(self, fd: int, incarnation: str) -> None:
        """Takes ownership of `fd` in every case. Raises PeerUnavailable when the file is of another
        incarnation or not a fence file."""
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

    def enter(self, token: FenceToken) -> None:
        """Hold the fence. Raises Fenced, without holding it, if the token is not valid any more,
        and TransferFailed when somebody holds the slot and revokes nothing."""
        if token.slot >= self._slots:
            raise Fenced(f"the owner has no fence slot {token.slot}")
        start, words = _slot_at(token.slot), self._words
        word, give_up = start // _WORD, time.monotonic() + PATIENCE_S
        while True:
            # Before the lock too, or the engine's thread would wait here for an owner that is
            # stopped in a revoke. It says which epoch dies before it takes the slot. A token of an
            # earlier grant is known by its epoch, while the owner revokes a later one.
            if words[word + 1] == token.epoch:
                raise Fenced("the grant is being revoked")
            if words[word] != token.epoch:
                raise Fenced("the grant was revoked")
            if lock.try_shared(self._fd, start, _SLOT_BYTES):
                break
            # The owner lets go of the slot after microseconds.
            if time.monotonic() >= give_up:
                raise TransferFailed("the owner holds the fence and does not let go")
            time.sleep(50e-6)
        if words[word] != token.epoch or words[_INCARNATION_AT] != self._word:
            lock.unlock(self._fd, start, _SLOT_BYTES)
            raise Fenced("the grant was revoked")

    def leave(self, token: FenceToken) -> None:
        """Let go of it. Called exactly once per successful `enter`."""
        lock.unlock(self._fd, _slot_at(token.slot), _SLOT_BYTES)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._fd)
