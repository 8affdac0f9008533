"""Following the block events of a decode worker."""

from __future__ import annotations

from array import array

import pytest

from pullfill.prefix.events import Replica, Ring, State
from pullfill.prefix.index import PrefixIndex
from pullfill.wire.codec import decode, encode
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage


def raw(*numbers: int) -> bytes:
    return array("Q", numbers).tobytes()


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


def sent(ring: Ring, number: int) -> list[tuple[int, int]]:
    """(operation, hash) of each event from `number` on."""
    found = ring.since(ring.epoch, number)
    assert found is not None
    ops = b"".join(one.ops for one in found)
    hashes = array("Q", b"".join(one.hashes for one in found))
    assert found[0].first == number
    return list(zip(ops, hashes, strict=True))


def test_it_keeps_the_last_events_in_their_order() -> None:
    ring, told = Ring(7), list[tuple[int, int]]()
    for turn in range(1, 40):
        op = Op.REMOVE if turn % 3 == 0 else Op.STORE
        some = range(10 * turn, 10 * turn + turn % 6)
        assert ring.append(op, some) == len(told) + len(some)
        told += [(int(op), one) for one in some]
        for number in range(max(0, len(told) - 7), len(told) + 1):
            assert sent(ring, number) == told[number:]
        assert ring.since(ring.epoch, len(told) + 1) is None
        if len(told) > 14:
            assert ring.since(ring.epoch, len(told) - 15) is None, "its memory is bounded"


def test_a_message_has_at_most_so_many_events() -> None:
    ring = Ring(3 * MAX_EVENTS)
    ring.append(Op.STORE, range(1, 2 * MAX_EVENTS + 2))
    found = ring.since(ring.epoch, 0)
    assert found is not None
    assert [len(one.ops) for one in found] == [MAX_EVENTS, MAX_EVENTS, 1]
    assert [one.held for one in found] == [None, None, 2 * MAX_EVENTS + 1]
    for one in found:
        assert decode(encode(one), PrefixEvents) == one


def test_a_snapshot_has_every_block_in_pages_that_fit() -> None:
    ring, hashes = Ring(1), range(1, 10 * MAX_EVENTS)
    ring.append(Op.STORE, hashes)
    pages = [one for one in ring.answer(PrefixFollow()) if isinstance(one, PrefixPage)]
    assert [one.page for one in pages] == list(range(10))
    assert [one.last for one in pages] == [False] * 9 + [True]
    found = b"".join(decode(encode(one), PrefixPage).hashes for one in pages)
    assert sorted(array("Q", found)) == list(hashes)
