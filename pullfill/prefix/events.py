"""The block events of one decode worker: `Ring` numbers and keeps them, `Replica` follows them.

The decode worker owns a Ring, and each frontend a Replica of it. The owner of a Replica sends what
its `ask` and `take` return to the decode worker, and hands `take` what the Ring's `answer` and
`since` gave. Messages may be lost, repeated or reordered. As long as the decode worker goes on
sending, with or without new events, the index ends with exactly the blocks that the worker holds.

    cold --snapshot or events from 0--> warm --gap, restart or difference--> behind --healed--> warm
"""

from __future__ import annotations

import enum
import secrets
from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from pullfill.prefix.index import PrefixIndex
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage

# What was asked for and did not come is asked for again after this time.
RETRY_S = 1.0


class Ring:
    """The last `max_events` block events at least, and the blocks held now.

    One thread owns it. epoch: tells this ring from that of another life of the worker, never 0.
    next: number of the next event."""

    def __init__(self, max_events: int) -> None:
        self.epoch = secrets.randbits(62) + 1
        self.next = 0
        self._size = max_events
        self._ops = bytearray()
        self._hashes = array("Q")
        self._held: set[int] = set()
        self._digest = 0

    def append(self, op: Op, hashes: Sequence[int] = (0,)) -> int:
        """Record that these blocks were stored or removed. Returns the number of the next event.

        CLEAR is one event, of block 0."""
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
        if len(self._ops) >= 2 * self._size:
            del self._ops[: -self._size], self._hashes[: -self._size]
        return self.next

    def answer(self, follow: PrefixFollow) -> Iterator[PrefixEvents | PrefixPage]:
        """What a frontend that asks is sent: the events that it lacks, or a snapshot first."""
        epoch, number = follow.epoch, follow.next
        events = self.since(epoch, number)
        if events is None:
            epoch, number = self.epoch, self.next
            yield from self._snapshot()
            # None: while the pages were sent, more came than the ring holds. It will ask again.
            events = self.since(epoch, number)
        yield from events or ()

    def since(self, epoch: int, number: int) -> list[PrefixEvents] | None:
        """The events from `number` on; one message without events if there are none.

        None: another epoch, or no longer in the ring, so send a snapshot."""
        oldest = self.next - len(self._ops)
        if (epoch != self.epoch and number) or not oldest <= number <= self.next:
            return None
        found = []
        for first in range(number, self.next, MAX_EVENTS) or (number,):
            part = slice(first - oldest, first - oldest + MAX_EVENTS)
            last = first + MAX_EVENTS >= self.next
            found.append(
                PrefixEvents(
                    epoch=self.epoch,
                    first=first,
                    ops=bytes(self._ops[part]),
                    hashes=self._hashes[part].tobytes(),
                    held=len(self._held) if last else None,
                    digest=self._digest & (2**63 - 1) if last else 0,
                )
            )
        return found

    def _snapshot(self) -> Iterator[PrefixPage]:
        """All blocks, page by page, as of now. After the last page send the events from `at` on."""
        at, held = self.next, array("Q", self._held)
        for start in range(0, len(held), MAX_EVENTS) or (0,):
            end = start + MAX_EVENTS
            yield PrefixPage(
                epoch=self.epoch,
                at=at,
                upto=at,
                page=start // MAX_EVENTS,
                last=end >= len(held),
                hashes=held[start:end].tobytes(),
            )


class State(enum.StrEnum):
    """How far the index can be believed about a worker."""

    # Nothing is known of it.
    COLD = "cold"
    WARM = "warm"
    # Events are missing. What is known still counts.
    BEHIND = "behind"


class Replica:
    """What one decode worker holds, under `name` in the index. Times are monotonic seconds.

    since: when `state` began. heard: when the worker last sent anything.
    healing: counts of gaps (events were missing), snapshots (taken over whole), restarts (the
    worker began a new epoch), duplicates, differences (all events came, yet the blocks differed).
    """

    def __init__(self, index: PrefixIndex, name: Hashable, now: float) -> None:
        self.state = State.COLD
        self.since = now
        self.heard = now
        self.healing: Counter[str] = Counter()
        self._index = index
        self._name = name
        self._epoch = 0
        self._next = 0
        # Number after the last event of this epoch that is known to exist.
        self._end = 0
        self._asked: float | None = None
        # (epoch, at, next page) of the snapshot that is coming in. Nothing is believed meanwhile.
        self._pages: tuple[int, int, int] | None = None

    @property
    def refused(self) -> int:
        """How many blocks of the worker are missing because the index was full."""
        return self._index.refused(self._name)

    def ask(self, now: float) -> PrefixFollow:
        """What to send first, and after a new connection."""
        self._asked = now
        return PrefixFollow(epoch=self._epoch, next=self._next)

    def take(self, message: PrefixEvents | PrefixPage, now: float) -> PrefixFollow | None:
        """Apply a message. Returns what to send to the worker, if anything.

        Raises ValueError for events that no ring sends; the index is unchanged then."""
        self.heard = now
        if isinstance(message, PrefixPage):
            return self._page(message, now)
        if len(message.hashes) != 8 * len(message.ops) or max(message.ops, default=0) > Op.CLEAR:
            raise ValueError("block events without a hash for each, or with an unknown operation")
        return self._events(message, now)

    def forget(self, now: float) -> None:
        """The worker is gone: its blocks are forgotten at once."""
        self._index.forget(self._name)
        self._believe(0, 0)
        self._asked = self._pages = None
        self._become(State.COLD, now)

    def _events(self, events: PrefixEvents, now: float) -> PrefixFollow | None:
        if events.epoch != self._epoch:
            if self._epoch:
                self.healing["restarts"] += 1
            if events.first:
                return self._restart(now)
            self._index.forget(self._name)
            self._believe(events.epoch, 0)
            self._pages = None
        self._end = max(self._end, events.first + len(events.ops))
        if events.first > self._next:
            if self.state is State.WARM:
                self.healing["gaps"] += 1
            return self._lost(now)
        known = self._next - events.first
        if known > len(events.ops):
            self.healing["duplicates"] += 1
            return None
        self._apply(events, known)
        # Before `_end` the index may have blocks of a snapshot that are newer than these events.
        done = self._next == self._end
        if done and events.held is not None and self._differs(events.held, events.digest):
            self.healing["differences"] += 1
            return self._restart(now)
        if done:
            self._asked = None
            self._become(State.WARM, now)
        return None

    def _apply(self, events: PrefixEvents, known: int) -> None:
        self._next += len(events.ops) - known
        clear = events.ops.rfind(Op.CLEAR, known)
        if clear >= 0:
            self._index.forget(self._name)
            known = clear + 1
        self._index.apply(self._name, events.ops[known:], _numbers(events.hashes[8 * known :]))

    def _differs(self, held: int, digest: int) -> bool:
        """Blocks that the index refused are missing for a reason that a snapshot does not heal."""
        if self.refused:
            return False
        return (held, digest) != (self._index.blocks(self._name), self._index.digest(self._name))

    def _page(self, page: PrefixPage, now: float) -> PrefixFollow | None:
        old = page.epoch == self._epoch and page.at < self._next
        if old or (page.page and self._pages is None):
            self.healing["duplicates"] += 1
            return None
        if page.page == 0:
            self._index.forget(self._name)
            self._believe(0, 0)
            self._pages = (page.epoch, page.at, 0)
        if self._pages != (page.epoch, page.at, page.page):
            return self._restart(now)
        self._index.store(self._name, _numbers(page.hashes))
        self._pages = (page.epoch, page.at, page.page + 1)
        # A snapshot that still comes in is not asked for again.
        self._asked = now
        if page.last:
            self.healing["snapshots"] += 1
            self._pages = None
            self._believe(page.epoch, page.at)
            self._end = page.upto
            if page.at == page.upto:
                self._become(State.WARM, now)
        return None

    def _believe(self, epoch: int, number: int) -> None:
        """All events of the epoch before this number are in the index."""
        self._epoch = epoch
        self._next = self._end = number

    def _restart(self, now: float) -> PrefixFollow | None:
        """Ask for everything. What the index has still counts until it comes."""
        self._believe(0, 0)
        return self._lost(now)

    def _lost(self, now: float) -> PrefixFollow | None:
        """Events are missing. Returns what to ask for, once in RETRY_S."""
        if self.state is State.WARM:
            self._become(State.BEHIND, now)
        if self._asked is not None and now - self._asked < RETRY_S:
            return None
        return self.ask(now)

    def _become(self, state: State, now: float) -> None:
        if state is not self.state:
            self.state, self.since = state, now


def _numbers(hashes: bytes) -> array[int]:
    """Raises ValueError if they are not whole u64."""
    found = array("Q")
    found.frombytes(hashes)
    return found
