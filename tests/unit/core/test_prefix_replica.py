"""Following the block events of a decode worker."""

from __future__ import annotations

import pytest

from pullfill.prefix.events import Original, Replica, State
from pullfill.prefix.index import PrefixIndex
from pullfill.wire.codec import decode, encode
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow


class Pair:
    """A decode worker's blocks and their replica, and the messages in between."""

    def __init__(self) -> None:
        self.original = Original()
        self.index = PrefixIndex(1000)
        self.now = 0.0
        self.replica = Replica(self.index, 5, self.now)

    def store(self, *hashes: int) -> list[PrefixEvents]:
        self.original.append(Op.STORE, hashes)
        return self.original.news()

    def heal(self, follow: PrefixFollow | None) -> None:
        assert follow is not None
        for page in self.original.snapshot():
            assert self.replica.take(page, self.now) is None

    def equal(self) -> bool:
        """Whether the next event finds no difference."""
        (event,) = self.store(100)
        return self.replica.take(event, self.now) is None and self.index.blocks(5) == event.held


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.essential
def test_a_gap_brings_a_snapshot(pair: Pair) -> None:
    pair.heal(pair.replica.ask(0))
    assert pair.replica.state is State.WARM
    pair.now = 10.0
    pair.store(1, 2, 3)  # lost
    (late,) = pair.store(4)
    pair.now = 11.0
    wanted = pair.replica.take(late, pair.now)
    assert pair.replica.state is State.BEHIND
    assert pair.replica.since == 11.0
    assert pair.replica.take(late, pair.now) is None, "asked twice"
    pair.heal(wanted)
    assert pair.replica.state is State.WARM
    assert pair.equal()
    assert (pair.replica.healing["gaps"], pair.replica.healing["snapshots"]) == (1, 2)


def test_an_index_that_differs_is_found_and_replaced(pair: Pair) -> None:
    pair.store(1, 2, 3)
    pair.heal(pair.replica.ask(0))
    pair.index.apply(5, b"\0", [2])
    (event,) = pair.store(4)
    pair.now = 5.0
    wanted = pair.replica.take(event, pair.now)
    assert pair.replica.state is State.BEHIND
    pair.heal(wanted)
    assert pair.equal()
    assert pair.replica.healing["differences"] == 1


def test_blocks_that_the_index_refused_are_not_asked_for_again(pair: Pair) -> None:
    pair.index = PrefixIndex(2)
    pair.replica = Replica(pair.index, 5, 0)
    pair.store(1, 2, 3)
    pair.heal(pair.replica.ask(0))
    (event,) = pair.store(4)
    assert pair.replica.take(event, pair.now) is None
    assert pair.replica.state is State.WARM
    assert pair.index.refused(5) == 2
    assert pair.replica.healing["differences"] == 0


# ------------------------------------------------------------------ the decode worker's side


def test_a_message_has_at_most_so_many_events() -> None:
    original = Original()
    original.append(Op.STORE, range(1, 2 * MAX_EVENTS + 2))
    found = original.news()
    assert [one.first for one in found] == [0, MAX_EVENTS, 2 * MAX_EVENTS]
    assert [len(one.ops) for one in found] == [MAX_EVENTS, MAX_EVENTS, 1]
    assert [one.held for one in found] == [None, None, 2 * MAX_EVENTS + 1]
    for one in found:
        assert decode(encode(one), PrefixEvents) == one
    assert original.news() == []
    pages = original.snapshot()
    assert [len(one.hashes) // 8 for one in pages] == [MAX_EVENTS, MAX_EVENTS, 1]
    assert [one.last for one in pages] == [False, False, True]
