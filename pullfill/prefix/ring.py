"""The decode worker's side: numbers its block events, and keeps the last ones and what it holds."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np

from pullfill.prefix.chain import HashArray, Hashes, as_array
from pullfill.prefix.index import PrefixIndex
from pullfill.prefix.table import SEGMENT
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage

_OWN = 0


class Ring:
    """The last `max_events` block events, and the blocks held now (`max_blocks` at most).

    One thread owns it. epoch: tells this ring from that of another life of the worker, never 0.
    next: number of the next event. max_blocks: at least the blocks that the worker can hold."""

    page_segments = MAX_EVENTS // SEGMENT
    """Segments of the table that are read for one page."""

    def __init__(self, max_events: int, max_blocks: int) -> None:
        self.epoch = secrets.randbits(62) + 1
        self.next = 0
        self._size = max_events
        self._ops = np.zeros(max_events, np.uint8)
        self._hashes = np.zeros(max_events, np.uint64)
        self._held = PrefixIndex(max_blocks)

    def append(self, op: Op, hashes: Hashes) -> int:
        """Record that these blocks were stored or removed. Returns the number of the next event.

        With CLEAR the hashes are ignored."""
        array = as_array(bytes(8) if op is Op.CLEAR else hashes)
        if op is Op.STORE:
            self._held.store(_OWN, array)
        elif op is Op.REMOVE:
            self._held.remove(_OWN, array)
        else:
            self._held.clear()
        self.next += len(array)
        kept = array[-self._size :]
        at = 0
        for part in self._parts(self.next - len(kept), self.next):
            self._ops[part] = op
            self._hashes[part] = kept[at : at + part.stop - part.start]
            at += part.stop - part.start
        return self.next

    def answer(self, follow: PrefixFollow) -> Iterator[PrefixEvents | PrefixPage]:
        """What a frontend that asks is sent: the events that it lacks, or a snapshot first."""
        epoch, number = follow.epoch, follow.next
        events = self.since(epoch, number)
        if events is None:
            epoch, number = self.epoch, self.next
            yield from self.snapshot()
            # None: while the pages were sent, more came than the ring holds. It will ask again.
            events = self.since(epoch, number)
        yield from events or ()

    def since(self, epoch: int, number: int) -> list[PrefixEvents] | None:
        """The events from `number` on; one message without events if there are none.

        None: another epoch, or no longer in the ring, so send `snapshot`."""
        if epoch != self.epoch and number:
            return None
        if not max(0, self.next - self._size) <= number <= self.next:
            return None
        found = []
        for first in range(number, self.next, MAX_EVENTS) or (number,):
            last = min(first + MAX_EVENTS, self.next)
            parts = self._parts(first, last)
            # A replica cannot have blocks that found no room here: then it must not compare.
            done = last == self.next and not self._held.refused(_OWN)
            found.append(
                PrefixEvents(
                    epoch=self.epoch,
                    first=first,
                    ops=b"".join(self._ops[part].tobytes() for part in parts),
                    hashes=b"".join(self._hashes[part].tobytes() for part in parts),
                    held=self._held.blocks(_OWN) if done else None,
                    digest=self._held.digest(_OWN) if done else 0,
                )
            )
        return found

    def snapshot(self) -> Iterator[PrefixPage]:
        """All blocks, page by page, as of now. Events may be appended between two pages; send those
        from `at` on after the last page."""
        at, number = self.next, 0
        waiting = b""
        for page in self._held.pages(_OWN, self.page_segments):
            if number or waiting:
                yield self._page(at, number, waiting, last=False)
                number += 1
            waiting = page.tobytes()
        yield self._page(at, number, waiting, last=True)

    def _page(self, at: int, number: int, hashes: bytes, last: bool) -> PrefixPage:
        return PrefixPage(
            epoch=self.epoch, at=at, upto=self.next, page=number, last=last, hashes=hashes
        )

    def held(self) -> HashArray:
        """The blocks held now, in any order."""
        return self._held.hashes(_OWN)

    def _parts(self, first: int, last: int) -> list[slice]:
        """Where events first .. last - 1 are: one part, or two around the end."""
        start, count = first % self._size, last - first
        end = min(start + count, self._size)
        return [slice(start, end), slice(0, count - (end - start))]
