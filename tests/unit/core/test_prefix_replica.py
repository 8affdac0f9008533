"""Following the block events of a decode worker."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pullfill.prefix.chain import HashArray
from pullfill.prefix.events import RETRY_S, Replica, Ring, State
from pullfill.prefix.index import PrefixIndex
from pullfill.wire.codec import decode, encode
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage


def blocks(*numbers: int) -> HashArray:
    return np.array(numbers, np.uint64)


class Pair:
    """A ring and its replica, and the messages in between."""

    def __init__(self, max_events: int = 1000) -> None:
        self.ring = Ring(max_events, 1000)
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
        held = np.sort(self.ring.held())
        return bool(np.array_equal(np.sort(self.index.hashes(5)), held))


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.essential
def test_a_gap_is_resent_and_a_large_one_brings_a_snapshot() -> None:
    for max_events, snapshots in ((1000, 0), (2, 1)):
        pair = Pair(max_events)
        pair.heal(pair.replica.ask(0))
        pair.now = 10.0
        pair.ring.append(Op.STORE, blocks(1, 2, 3))
        pair.sent = pair.ring.next
        pair.ring.append(Op.STORE, blocks(4))
        (late,) = pair.news()
        pair.now = 11.0
        wanted = pair.replica.take(late, pair.now)
        assert pair.replica.state is State.BEHIND
        assert pair.replica.since == 11.0
        assert pair.replica.take(late, pair.now) is None, "asked twice"
        pair.heal(wanted)
        assert pair.replica.state is State.WARM
        assert pair.equal()
        assert (pair.replica.healing.gaps, pair.replica.healing.snapshots) == (1, snapshots)


def test_what_was_lost_is_asked_for_again(pair: Pair) -> None:
    pair.heal(pair.replica.ask(0))
    pair.ring.append(Op.STORE, blocks(1))
    pair.news()
    (beat,) = pair.news()
    assert pair.replica.take(beat, 1.0) is not None
    assert pair.replica.take(beat, 1.0 + RETRY_S / 2) is None
    pair.heal(pair.replica.take(beat, 1.0 + RETRY_S))
    assert pair.equal()


def test_a_snapshot_read_over_time_is_good_when_its_events_have_come() -> None:
    pair = Pair(max_events=10)
    pair.ring.append(Op.STORE, blocks(*range(1, 20)))
    answer = pair.ring.answer(pair.replica.ask(0))
    # Read after the snapshot began: the page has the block already.
    (page,) = (one for one in [next(answer)] if isinstance(one, PrefixPage))
    pair.ring.append(Op.STORE, blocks(77))
    later = msgspec.structs.replace(page, hashes=page.hashes + blocks(77).tobytes(), upto=20)
    assert pair.replica.take(later, 1.0) is None
    assert pair.replica.state is State.COLD
    beat = PrefixEvents(epoch=page.epoch, first=19, ops=b"", hashes=b"", held=19)
    assert pair.replica.take(beat, 1.0) is None, "compared with a moment that it is ahead of"
    for message in answer:
        pair.replica.take(message, 1.0)
    assert pair.replica.state is State.WARM
    assert pair.replica.healing.differences == 0
    assert pair.equal()


def test_an_index_that_differs_is_found_and_replaced(pair: Pair) -> None:
    pair.ring.append(Op.STORE, blocks(1, 2, 3))
    pair.heal(pair.replica.ask(0))
    pair.index.remove(5, blocks(2))
    pair.sent = pair.ring.next
    (beat,) = pair.news()
    pair.now = 5.0
    wanted = pair.replica.take(beat, pair.now)
    assert pair.replica.state is State.BEHIND
    pair.heal(wanted)
    assert pair.equal()
    assert pair.replica.healing.differences == 1


def test_blocks_that_the_index_refused_are_not_asked_for_again(pair: Pair) -> None:
    pair.index = PrefixIndex(2)
    pair.replica = Replica(pair.index, 5, 0)
    pair.ring.append(Op.STORE, blocks(1, 2, 3))
    pair.heal(pair.replica.ask(0))
    assert pair.replica.state is State.WARM
    assert pair.index.refused(5) == 1
    assert pair.replica.healing.differences == 0


def test_refused_blocks_are_fetched_once_there_is_room(pair: Pair) -> None:
    pair.index = PrefixIndex(4)
    pair.replica = Replica(pair.index, 5, 0)
    pair.index.store(1, blocks(91, 92, 93))
    pair.ring.append(Op.STORE, blocks(1, 2, 3))
    pair.heal(pair.replica.ask(0))
    assert pair.replica.refused == 2
    pair.index.remove(1, blocks(91, 92, 93))
    (beat,) = pair.news() and pair.news()
    assert pair.replica.take(beat, 15 * RETRY_S) is None
    pair.now = 30 * RETRY_S
    pair.heal(pair.replica.take(beat, pair.now))
    assert pair.equal()
    assert pair.replica.refused == 0


def test_a_snapshot_without_one_page_is_not_adopted() -> None:
    pair = Pair(max_events=1)
    pair.ring.append(Op.STORE, blocks(1, 2))
    (page,) = (m for m in pair.ring.answer(pair.replica.ask(0)) if isinstance(m, PrefixPage))
    half = {"epoch": page.epoch, "at": page.at, "upto": page.upto}
    pages = [
        PrefixPage(**half, page=0, last=False, hashes=blocks(1).tobytes()),
        PrefixPage(**half, page=2, last=True, hashes=blocks(2).tobytes()),
    ]
    assert [pair.replica.take(one, 0.1) for one in pages] == [None, None]
    assert pair.replica.state is State.COLD
    assert pair.index.match(blocks(1, 2)) == {}


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
    hashes = np.frombuffer(b"".join(one.hashes for one in found), np.uint64)
    assert found[0].first == number
    return list(zip(ops, hashes.tolist(), strict=True))


def test_it_keeps_the_last_events_in_their_order() -> None:
    ring, told = Ring(7, 1000), []
    for turn in range(1, 40):
        op = Op.REMOVE if turn % 3 == 0 else Op.STORE
        some = blocks(*range(10 * turn, 10 * turn + turn % 6))
        assert ring.append(op, some) == len(told) + len(some)
        told += [(int(op), one) for one in some.tolist()]
        for number in range(max(0, len(told) - 7), len(told) + 1):
            assert sent(ring, number) == told[number:]
        assert ring.since(ring.epoch, len(told) + 1) is None
        if len(told) > 7:
            assert ring.since(ring.epoch, len(told) - 8) is None


def test_a_message_has_at_most_so_many_events() -> None:
    ring = Ring(3 * MAX_EVENTS, 3 * MAX_EVENTS)
    ring.append(Op.STORE, np.arange(1, 2 * MAX_EVENTS + 2, dtype=np.uint64))
    found = ring.since(ring.epoch, 0)
    assert found is not None
    assert [len(one.ops) for one in found] == [MAX_EVENTS, MAX_EVENTS, 1]
    assert [one.held for one in found] == [None, None, 2 * MAX_EVENTS + 1]
    for one in found:
        assert decode(encode(one), PrefixEvents) == one


def test_a_snapshot_has_every_block_in_pages_that_fit() -> None:
    ring = Ring(1, 20_000)
    hashes = np.random.default_rng(5).integers(1, 2**64 - 1, 20_000, np.uint64)
    ring.append(Op.STORE, hashes)
    pages = [one for one in ring.answer(PrefixFollow()) if isinstance(one, PrefixPage)]
    assert len(pages) > 4
    assert [one.page for one in pages] == list(range(len(pages)))
    assert [one.last for one in pages] == [False] * (len(pages) - 1) + [True]
    found = [np.frombuffer(decode(encode(one), PrefixPage).hashes, np.uint64) for one in pages]
    assert np.array_equal(np.sort(np.concatenate(found)), np.sort(hashes))


@pytest.mark.parametrize(("max_blocks", "held"), [(3, 3), (2, None)])
def test_what_it_could_not_keep_is_not_to_be_compared(max_blocks: int, held: int | None) -> None:
    ring = Ring(10, max_blocks)
    ring.append(Op.STORE, blocks(1, 2, 3))
    found = ring.since(ring.epoch, 3)
    assert found is not None
    assert found[-1].held == held
    ring.append(Op.CLEAR, b"")
    assert len(ring.held()) == 0
