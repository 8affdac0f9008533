"""Which pairs of workers stay connected: some for each worker, few in all."""

from __future__ import annotations

from collections import Counter

from pullfill.decode_worker.peers import Peer, Peers
from pullfill.prefill_worker.decode_links import LEAST, standing_links
from pullfill.wire import Load


def fleet(decode: int, prefill: int, most: int, without: str = "") -> dict[str, set[str]]:
    """The choice of each prefill worker."""
    names = {f"prefill-{n}" for n in range(prefill)} - {without}
    decodes = [f"decode-{n}" for n in range(decode)]
    return {name: standing_links(name, names - {name}, decodes, most) for name in names}


def seen(chosen: dict[str, set[str]]) -> dict[str, set[str]]:
    """The prefill workers of each decode worker."""
    found: dict[str, set[str]] = {}
    for name, decodes in chosen.items():
        for decode in decodes:
            found.setdefault(decode, set()).add(name)
    return found


def test_links_of_a_large_fleet_are_linear_in_its_workers() -> None:
    total: Counter[int] = Counter()
    for size in (32, 64, 128):
        chosen = fleet(size, size, 8)
        each = [len(decodes) for decodes in chosen.values()]
        assert min(len(workers) for workers in seen(chosen).values()) >= 8
        assert min(each) >= LEAST
        assert max(each) < 4 * 8, "no prefill worker has many times the links of another"
        total[size] = sum(each)
        assert total[size] <= (8 + LEAST) * size
    assert total[128] < 5 * total[32]


def test_a_worker_that_leaves_moves_only_its_own_links() -> None:
    before, after = seen(fleet(20, 20, 5)), seen(fleet(20, 20, 5, without="prefill-7"))
    for decode in before:
        assert before[decode] - after[decode] <= {"prefill-7"}
        assert len(after[decode] - before[decode]) <= int("prefill-7" in before[decode])
        assert len(after[decode]) >= 5


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
