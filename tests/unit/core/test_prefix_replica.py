"""Following the block events of a decode worker."""

from __future__ import annotations

import pytest

from pullfill.prefix.events import Replica, Ring, State
from pullfill.prefix.index import PrefixIndex
from pullfill.wire.codec import decode, encode
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow


class Pair:
    """A ring and its replica, and the messages in between."""

    def __init__(self, max_events: int = 1000) -> None:
        self.ring = Ring(max_events)
        self.index = PrefixIndex(1000)
        self.now = 0.0
        self.replica = Replica(self.index, 5, self.now)
        self.sent = 0

    def news(self) -> list[PrefixEvents]:
        found = self.ring.since(self.ring.epoch, self.sent)
        assert found is not None
        self.sent = self.ring.next
        return found

    def heal(self, follow: PrefixFollow | None) -> None:
        while follow:
            answers = list(self.ring.answer(follow))
            follow = None
            for message in answers:
                follow = self.replica.take(message, self.now) or follow

    def equal(self) -> bool:
        (beat,) = self.ring.since(self.ring.epoch, self.ring.next) or ()
        return (beat.held, beat.digest) == (self.index.blocks(5), self.index.digest(5))


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.essential
def test_a_gap_is_resent_and_a_large_one_brings_a_snapshot() -> None:
    for max_events, snapshots in ((1000, 0), (2, 1)):
        pair = Pair(max_events)
        pair.heal(pair.replica.ask(0))
        pair.now = 10.0
        pair.ring.append(Op.STORE, [1, 2, 3])
        pair.sent = pair.ring.next
        pair.ring.append(Op.STORE, [4])
        (late,) = pair.news()
        pair.now = 11.0
        wanted = pair.replica.take(late, pair.now)
        assert pair.replica.state is State.BEHIND
        assert pair.replica.since == 11.0
        assert pair.replica.take(late, pair.now) is None, "asked twice"
        pair.heal(wanted)
        assert pair.replica.state is State.WARM
        assert pair.equal()
        assert (pair.replica.healing["gaps"], pair.replica.healing["snapshots"]) == (1, snapshots)


def test_an_index_that_differs_is_found_and_replaced(pair: Pair) -> None:
    pair.ring.append(Op.STORE, [1, 2, 3])
    pair.heal(pair.replica.ask(0))
    pair.index.apply(5, b"\0", [2])
    pair.sent = pair.ring.next
    (beat,) = pair.news()
    pair.now = 5.0
    wanted = pair.replica.take(beat, pair.now)
    assert pair.replica.state is State.BEHIND
    pair.heal(wanted)
    assert pair.equal()
    assert pair.replica.healing["differences"] == 1


def test_blocks_that_the_index_refused_are_not_asked_for_again(pair: Pair) -> None:
    pair.index = PrefixIndex(2)
    pair.replica = Replica(pair.index, 5, 0)
    pair.ring.append(Op.STORE, [1, 2, 3])
    pair.heal(pair.replica.ask(0))
    assert pair.replica.state is State.WARM
    assert pair.index.refused(5) == 1
    assert pair.replica.healing["differences"] == 0


def test_events_that_no_ring_sends_are_refused(pair: Pair) -> None:
    for ops, hashes in ((b"\1\1", bytes(8)), (b"\3", bytes(8))):
        with pytest.raises(ValueError, match="block events"):
            pair.replica.take(PrefixEvents(epoch=1, first=0, ops=ops, hashes=hashes), 0)


# ------------------------------------------------------------------ the decode worker's side


def test_a_message_has_at_most_so_many_events() -> None:
    ring = Ring(3 * MAX_EVENTS)
    ring.append(Op.STORE, range(1, 2 * MAX_EVENTS + 2))
    found = ring.since(ring.epoch, 0)
    assert found is not None
    assert [len(one.ops) for one in found] == [MAX_EVENTS, MAX_EVENTS, 1]
    assert [one.held for one in found] == [None, None, 2 * MAX_EVENTS + 1]
    for one in found:
        assert decode(encode(one), PrefixEvents) == one
