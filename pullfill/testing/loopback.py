"""Owner and peer in one process: a whole transport over plain memory, with faults on demand.

For tests of every room that moves blocks. `LoopbackOwner.faults` stops a batch while it holds its
fence. Then it lets the batch go on, or ends it as if the writer's process had died. The loopback
also checks what shm cannot check: a write or read outside the granted blocks raises BadMessage.

Peers reach an owner by its endpoint, from its construction until `close`.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pullfill.errors import (
    BadMessage,
    ConfigError,
    Fenced,
    OverloadedError,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.transfer.contract import (
    Direction,
    FenceHold,
    KvLayout,
    LocalMemory,
    MoveResult,
    PeerSession,
    Rect,
)
from pullfill.transfer.layout import both_sides, check_bounds
from pullfill.transfer.runs import checked_ids
from pullfill.transfer.session import MappedSession
from pullfill.wire import FenceToken, RegionDescriptor

_owners: dict[str, LoopbackOwner] = {}


@dataclass(slots=True)
class _Slot:
    epoch: int = field(default_factory=lambda: secrets.randbits(61))
    dying: bool = False
    holders: int = 0
    granted: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()


class LoopbackFences:
    """OwnerFences in one process. `changed` guards everything."""

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


class LoopbackFaults:
    """Stops batches while they hold their fence. Thread-safe; for tests."""

    def __init__(self, fences: LoopbackFences) -> None:
        self._fences = fences
        self._pass_first: int | None = None
        self._held = 0
        self._kill = False

    def hold(self, after: int = 0) -> None:
        """Stop every batch but the next `after` ones, while it holds its fence, until `resume`."""
        with self._fences.changed:
            self._pass_first, self._kill = after, False

    def wait_held(self, timeout_s: float = 10.0) -> bool:
        """Wait until a batch is stopped."""
        with self._fences.changed:
            return self._fences.changed.wait_for(lambda: self._held > 0, timeout_s)

    def resume(self) -> None:
        """Let the stopped batches go on. They copy all their bytes."""
        self._end(kill=False)

    def kill(self, timeout_s: float = 10.0) -> None:
        """End the stopped batches as if their process had died: they move no byte. Returns when
        they have let go of their fences."""
        self._end(kill=True)
        with self._fences.changed:
            quiet = self._fences.changed.wait_for(
                lambda: not any(slot.holders for slot in self._fences.slots), timeout_s
            )
        if not quiet:
            raise TimeoutError("a held batch did not end")

    def _end(self, *, kill: bool) -> None:
        with self._fences.changed:
            self._pass_first, self._kill = None, kill
            self._fences.changed.notify_all()

    def inside_batch(self) -> None:
        """Called by sessions while they hold a fence."""
        with self._fences.changed:
            if self._pass_first is None:
                return
            if self._pass_first > 0:
                self._pass_first -= 1
                return
            self._held += 1
            self._fences.changed.notify_all()
            self._fences.changed.wait_for(lambda: self._pass_first is None)
            self._held -= 1
            if self._kill:
                raise TransferFailed("the writer died in a batch")


class LoopbackOwner:
    """Owner over memory of this process. The memory must outlive it."""

    def __init__(self, memory: LocalMemory, incarnation: str, *, slots: int = 64) -> None:
        check_bounds(memory.layout, memory.nbytes)
        self.memory = memory
        self.incarnation = incarnation
        self._name = f"loopback:{secrets.token_hex(8)}"
        self.fences = LoopbackFences(memory.layout.num_blocks, slots)
        self.faults = LoopbackFaults(self.fences)
        _owners[self._name] = self

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        return {"loopback": self._name}

    def renew(self, incarnation: str) -> None:
        with self.fences.changed:
            self.incarnation = incarnation

    def close(self) -> None:
        self.fences.close()
        _owners.pop(self._name, None)


class _LoopbackHold(FenceHold):
    def __init__(self, owner: LoopbackOwner) -> None:
        self._owner = owner
        self._incarnation = owner.incarnation

    def enter(self, token: FenceToken) -> None:
        fences = self._owner.fences
        with fences.changed:
            if self._owner.incarnation != self._incarnation:
                raise Fenced("the region belongs to another incarnation of its owner")
            fences.valid(token).holders += 1

    def leave(self, token: FenceToken) -> None:
        fences = self._owner.fences
        with fences.changed:
            fences.slots[token.slot].holders -= 1
            fences.changed.notify_all()

    def inside_batch(self, verb: str) -> None:
        self._owner.faults.inside_batch()

    def close(self) -> None:
        pass


class _Session(MappedSession):
    def __init__(self, local: LocalMemory, layout: KvLayout, owner: LoopbackOwner) -> None:
        super().__init__("loopback", local, layout, owner.memory.address, _LoopbackHold(owner))
        self._owner = owner

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        writes = verb == "write"
        self._check(fence, target if writes else source, writes=writes)
        return super().move(verb, fence, source, target)

    def _check(self, fence: FenceToken, blocks: Sequence[int], *, writes: bool) -> None:
        ids = checked_ids(blocks, self._owner.memory.layout.num_blocks, "named")
        outside = set(ids.tolist()) - self._owner.fences.granted(fence, writes=writes)
        if outside:
            raise BadMessage(f"blocks {sorted(outside)[:8]} are outside the grant")


class LoopbackTransport:
    """PeerTransport to owners of this process."""

    name = "loopback"

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        if descriptor.endpoints.get(self.name) not in _owners:
            return "its owner is not in this process"
        return None

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        ours, theirs = both_sides(local, descriptor, part)
        owner = _owners.get(descriptor.endpoints.get(self.name, ""))
        if owner is None:
            raise PeerUnavailable(f"{descriptor.instance_id} is not in this process")
        if owner.incarnation != descriptor.incarnation:
            raise PeerUnavailable("the region belongs to another incarnation of its owner")
        if descriptor.nbytes != owner.memory.nbytes:
            raise BadMessage(f"descriptor of {descriptor.nbytes} bytes, region is another size")
        return _Session(ours, theirs, owner)
