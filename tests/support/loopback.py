"""Fences in plain memory, and shared memory whose copies stop on demand: with faults for tests."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pullfill.errors import ConfigError, Fenced, OverloadedError, TransferFailed
from pullfill.transfer.contract import LocalMemory, PeerSession, Rect
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.owners import Owner
from pullfill.transfer.runs import Batch
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.wire import FenceToken, RegionDescriptor


@dataclass(slots=True)
class _Slot:
    epoch: int = field(default_factory=lambda: secrets.randbits(61))
    dying: bool = False
    holders: int = 0
    granted: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()


class LoopbackFences:
    """OwnerFences in plain memory. `changed` guards everything; `holders` stand for locks."""

    def __init__(self, num_blocks: int, slots: int) -> None:
        self.changed = threading.Condition()
        self.slots = [_Slot() for _ in range(slots)]
        self.closed = False
        self._num_blocks = num_blocks
        self._free = deque(range(slots))

    @property
    def in_use(self) -> int:
        return len(self.slots) - len(self._free)

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ConfigError(f"a granted block is outside 0..{self._num_blocks - 1}")
        with self.changed:
            if self.closed:
                raise ConfigError("the region is closed")
            if not self._free:
                raise OverloadedError(f"all {len(self.slots)} fence slots are in use")
            number = self._free.popleft()
            self.slots[number].granted = frozenset(block_ids)
            self.slots[number].targets = frozenset(block_ids[first_target:])
            return FenceToken(slot=number, epoch=self.slots[number].epoch)

    def try_revoke(self, token: FenceToken) -> bool:
        if token.slot >= len(self.slots):
            raise ConfigError(f"no fence slot {token.slot}")
        with self.changed:
            if self.closed:
                raise ConfigError("the region is closed: nothing can be proved any more")
            slot = self.slots[token.slot]
            if slot.epoch != token.epoch:
                return True
            slot.dying = slot.holders > 0
            if slot.dying:
                return False
            slot.epoch += 1
            slot.granted = slot.targets = frozenset()
            self._free.append(token.slot)
            return True

    def granted(self, token: FenceToken, *, writes: bool = False) -> frozenset[int]:
        """Return the blocks that the token grants. Raises Fenced if the token is not valid.

        writes: return only those that may be written."""
        with self.changed:
            slot = self.valid(token)
            return slot.targets if writes else slot.granted

    def valid(self, token: FenceToken) -> _Slot:
        """The token's slot. The caller holds `changed`. Raises Fenced."""
        slot = self.slots[token.slot] if token.slot < len(self.slots) else None
        if self.closed or slot is None or slot.epoch != token.epoch or slot.dying:
            raise Fenced("the grant was revoked")
        return slot

    def close(self) -> None:
        with self.changed:
            self.closed = True


class Faults:
    """Stops batches while they hold their fence. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pass_first: int | None = None
        self._held = 0
        self._kill = False

    def hold(self, after: int = 0) -> None:
        """Stop every batch but the next `after` ones, while it holds its fence, until `resume`."""
        with self._changed:
            self._pass_first, self._kill = after, False

    def wait_held(self, timeout_s: float = 10.0) -> bool:
        """Wait until a batch is stopped."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held > 0, timeout_s)

    def resume(self) -> None:
        """Let the stopped batches go on. They copy all their bytes."""
        self._end(kill=False)

    def kill(self) -> None:
        """End the stopped batches as if their process had died: they move no byte."""
        self._end(kill=True)

    def _end(self, *, kill: bool) -> None:
        with self._changed:
            self._pass_first, self._kill = None, kill
            self._changed.notify_all()

    def inside_batch(self) -> None:
        with self._changed:
            if self._pass_first is None:
                return
            if self._pass_first > 0:
                self._pass_first -= 1
                return
            self._held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pass_first is None)
            self._held -= 1
            if self._kill:
                raise TransferFailed("the writer died in a batch")

    def copy(self, source: int, target: int, batch: Batch) -> None:
        """A session's copier."""
        self.inside_batch()
        copy_batch(source, target, batch)


class LoopbackOwner(Owner):
    """Of shared memory, under another name, with faults for those who copy from and to it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.faults = Faults()

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        return {"loopback": super().endpoints(rank)["shm"]}


class LoopbackTransport(ShmTransport):
    """To the owners of this process that are in `owners`, by endpoint."""

    name = "loopback"

    def __init__(self) -> None:
        self.owners: dict[str, LoopbackOwner] = {}

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        endpoint = descriptor.endpoints[self.name]
        shm = msgspec.structs.replace(descriptor, endpoints={"shm": endpoint})
        session = super().connect(local, shm, part)
        if (owner := self.owners.get(endpoint)) is not None:
            session._copy = owner.faults.copy  # type: ignore[attr-defined]
        return session

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        endpoints = {"shm": descriptor.endpoints[self.name]}
        return super().can_reach(msgspec.structs.replace(descriptor, endpoints=endpoints))
