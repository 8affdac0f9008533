"""Which pairs of workers stay connected: some for each worker, few in all."""

from __future__ import annotations

from collections import Counter

import pytest

from pullfill.decode_worker.peers import Peer, Peers
from pullfill.prefill_worker.decode_links import LEAST, Ranking
from pullfill.wire import Load


def fleet(decode: int, prefill: int, most: int) -> dict[str, Ranking]:
    """The choice of each prefill worker, each of which heard of the others in another order."""
    names = [f"prefill-{n}" for n in range(prefill)]
    chosen = {name: Ranking(name, most) for name in names}
    for number, standing in enumerate(chosen.values()):
        others = names[number:] + names[:number]
        for other in others[: prefill // 2]:
            standing.prefill(other, True)
        for n in range(decode):
            standing.decode(f"decode-{n}", True)
        for other in others[prefill // 2 :]:
            standing.prefill(other, True)
    return chosen


def seen(chosen: dict[str, Ranking]) -> dict[str, set[str]]:
    """The prefill workers of each decode worker."""
    found: dict[str, set[str]] = {}
    for name, standing in chosen.items():
        for decode in standing.wanted():
            found.setdefault(decode, set()).add(name)
    return found


@pytest.mark.parametrize(("decode", "prefill"), [(1, 1), (7, 8), (100, 8)])
def test_few_prefill_workers_are_connected_to_all(decode: int, prefill: int) -> None:
    chosen = fleet(decode, prefill, 8)
    assert all(len(standing.wanted()) == decode for standing in chosen.values())
    assert {standing.pool for standing in chosen.values()} == {0}


def test_links_of_a_large_fleet_are_linear_in_its_workers() -> None:
    total: Counter[int] = Counter()
    for size in (32, 64, 128):
        chosen = fleet(size, size, 8)
        each = [len(standing.wanted()) for standing in chosen.values()]
        prefill = seen(chosen)
        assert min(len(workers) for workers in prefill.values()) >= 8
        assert min(each) >= LEAST
        assert max(each) < 4 * 8, "no prefill worker has many times the links of another"
        assert {standing.pool for standing in chosen.values()} == {size}
        total[size] = sum(each)
        assert total[size] <= (8 + LEAST) * size
    assert total[128] < 5 * total[32]


def test_every_prefill_worker_of_many_is_connected_to_somebody() -> None:
    chosen = fleet(6, 100, 8)
    assert {len(standing.wanted()) for standing in chosen.values()} <= {4, 5, 6}
    assert min(len(workers) for workers in seen(chosen).values()) >= 8


def test_a_worker_that_leaves_moves_only_its_own_links() -> None:
    chosen = fleet(20, 20, 5)
    before = seen(chosen)
    gone = chosen.pop("prefill-7")
    for standing in chosen.values():
        standing.prefill("prefill-7", False)
    after = seen(chosen)
    for decode in before:
        new = after[decode] - before[decode]
        assert (
            len(new) == int(decode in gone.wanted() and len(before[decode]) == 5)
            or len(after[decode]) >= 5
        )
        assert before[decode] - after[decode] <= {"prefill-7"}
        assert len(after[decode]) >= 5
    for standing in chosen.values():
        standing.prefill("prefill-7", True)
        standing.prefill("prefill-7", True)
    assert seen(chosen | {"prefill-7": gone}) == before


def test_decode_workers_come_and_go() -> None:
    standing = Ranking("prefill-1", 4)
    for _ in range(2):
        standing.decode("decode-1", True)
        standing.prefill("prefill-1", True)
    assert (standing.wanted(), standing.pool) == ({"decode-1"}, 0)
    for _ in range(2):
        standing.decode("decode-1", False)
    assert standing.wanted() == set()


def connected(*workers: tuple[bool, int]) -> Peers:
    """(whether it pulls, how many prefill workers it tells of)"""
    nobody: object = None
    made = Peers()
    for number, (pulls, pool) in enumerate(workers):
        peer = Peer(f"p{number}#1", f"p{number}", nobody, 0.0)  # type: ignore[arg-type]
        peer.pulls, peer.load = pulls, Load(pool=pool)
        made[peer.name] = peer
    return made


def test_a_decode_worker_counts_those_it_is_not_connected_to() -> None:
    assert connected().pool == 0
    assert connected((True, 0), (True, 0), (False, 0)).pool == 2
    assert connected((True, 0), (True, 40)).pool == 40, "the first did not see them come yet"
    assert connected((True, 40), (False, 40)).pool == 20, "half of them pull"
    assert connected((False, 40)).pool == 0
