"""Which blocks one decode worker holds: `Original` numbers the changes, `Replica` follows them.

The decode worker owns the Original, and each frontend a Replica of it. The owner of a Replica sends
what its `ask` and `take` return to the decode worker, which answers with a `snapshot`. It hands
`take` these pages, and the `news` that all who follow get. A connection loses none of them, and
keeps their order. If one is missing all the same, the next event with a digest tells.

    cold --snapshot--> warm --gap or difference--> behind --snapshot--> warm
"""

from __future__ import annotations

import enum
import secrets
import struct
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence

from pullfill.prefix.index import PrefixIndex
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage


class Original:
    """The blocks that a decode worker holds now. It numbers each change.

    One thread owns it. epoch: tells it from that of another life of the worker, never 0.
    next: number of the next event."""

    def __init__(self) -> None:
        self.epoch = secrets.randbits(62) + 1
        self.next = 0
        self._held: set[int] = set()
        self._digest = 0
        # The events that `news` has not returned yet.
        self._ops = bytearray()
        self._hashes = array("Q")

    def append(self, op: Op, hashes: Sequence[int] = (0,)) -> None:
        """Record that these blocks were stored or removed. CLEAR is one event, of block 0."""
        if op is Op.CLEAR:
            self._held.clear()
            self._digest = 0
        else:
            for one in hashes:
                if (one in self._held) is not (op is Op.STORE):
                    self._digest ^= one
                    self._held ^= {one}
        self._ops += bytes([op]) * len(hashes)
        self._hashes.extend(hashes)
        self.next += len(hashes)

    def news(self) -> list[PrefixEvents]:
        """Return the events since the last call, for all who follow."""
        ops, self._ops = self._ops, bytearray()
        hashes, self._hashes = self._hashes, array("Q")
        found = []
        for start in range(0, len(ops), MAX_EVENTS):
            end = start + MAX_EVENTS
            last = end >= len(ops)
            found.append(
                PrefixEvents(
                    epoch=self.epoch,
                    first=self.next - len(ops) + start,
                    ops=bytes(ops[start:end]),
                    hashes=hashes[start:end].tobytes(),
                    held=len(self._held) if last else None,
                    digest=self._digest & (2**63 - 1) if last else 0,
                )
            )
        return found

    def snapshot(self) -> list[PrefixPage]:
        """Return all blocks, for one who begins to follow or has missed something. `news` must have
        returned all events."""
        # 200,000 blocks take 20 ms. An array of them would take twice as long as `pack`.
        held = list(self._held)
        parts = [held[at : at + MAX_EVENTS] for at in range(0, len(held), MAX_EVENTS) or (0,)]
        return [
            PrefixPage(
                epoch=self.epoch,
                at=self.next,
                page=number,
                last=number + 1 == len(parts),
                hashes=struct.pack(f"<{len(part)}Q", *part),
            )
            for number, part in enumerate(parts)
        ]


class State(enum.StrEnum):
    """How far the index can be believed about a worker."""

    # Nothing is known of it.
    COLD = "cold"
    WARM = "warm"
    # Events are missing. What is known still counts.
    BEHIND = "behind"


class Replica:
    """What one decode worker holds, under `name` in the index. Times are monotonic seconds.

    since: when `state` began. asked: when the worker was last asked, or has sent a part of its
    answer.
    healing: counts of gaps (events were missing), snapshots (taken over whole), differences (all
    events came, yet the blocks differed).
    """

    def __init__(self, index: PrefixIndex, name: Hashable, now: float) -> None:
        self.state = State.COLD
        self.since = self.asked = now
        self.healing: Counter[str] = Counter()
        self._index = index
        self._name = name
        # The first event that is not in the index: epoch, number. Epoch 0: it is not known.
        self._next = 0, 0

    def ask(self, now: float) -> PrefixFollow:
        """What to send first, or to be told all blocks again. What the index has still counts until
        they come."""
        self.asked = now
        self._next = 0, 0
        return PrefixFollow()

    def take(self, message: PrefixEvents | PrefixPage, now: float) -> PrefixFollow | None:
        """Apply a message. Returns what to send to the worker, if anything.

        Raises ValueError for events that no worker sends; the index is unchanged then."""
        if isinstance(message, PrefixPage):
            self._page(message, now)
            return None
        if len(message.hashes) != 8 * len(message.ops) or max(message.ops, default=0) > Op.CLEAR:
            raise ValueError("block events without a hash for each, or with an unknown operation")
        return self._events(message, now)

    def _page(self, page: PrefixPage, now: float) -> None:
        self.asked = now
        if page.page == 0:
            self._index.forget(self._name)
            self._next = 0, 0
        self._index.store(self._name, _numbers(page.hashes))
        if page.last:
            self.healing["snapshots"] += 1
            self._next = page.epoch, page.at
            self._become(State.WARM, now)

    def _events(self, events: PrefixEvents, now: float) -> PrefixFollow | None:
        if (events.epoch, events.first) != self._next:
            return self._lost("gaps", now)
        self._next = events.epoch, events.first + len(events.ops)
        done = events.ops.rfind(Op.CLEAR) + 1
        if done:
            self._index.forget(self._name)
        self._index.apply(self._name, events.ops[done:], _numbers(events.hashes[8 * done :]))
        if events.held is None:  # more of them follow
            return None
        ours = self._index.held(self._name)
        same = (events.held, events.digest) == (len(ours.blocks), ours.digest & (2**63 - 1))
        # Blocks that the index refused are missing for a reason that a snapshot does not heal.
        if not same and not ours.refused:
            return self._lost("differences", now)
        self._become(State.WARM, now)
        return None

    def _lost(self, what: str, now: float) -> PrefixFollow | None:
        """Ask for all blocks, if that was not asked already."""
        if self.state is not State.WARM:
            return None
        self.healing[what] += 1
        self._become(State.BEHIND, now)
        return self.ask(now)

    def _become(self, state: State, now: float) -> None:
        if state is not self.state:
            self.state, self.since = state, now


def _numbers(hashes: bytes) -> array[int]:
    """Raises ValueError if they are not whole u64."""
    found = array("Q")
    found.frombytes(hashes)
    return found
