"""The last block events of a decode worker."""

from __future__ import annotations

import numpy as np
import pytest

from pullfill.prefix.chain import HashArray
from pullfill.prefix.events import Ring
from pullfill.wire.codec import decode, encode
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage


def blocks(*numbers: int) -> HashArray:
    return np.array(numbers, np.uint64)


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
