"""Two decode workers with real engines: which of them gets a prompt, what the frontend knows of
their prefix caches, and prompts that move and take their prefix along.

The tokens of every answer are those of one plain engine, also when the holder of a prefix is killed
in the middle of a read. Other ends of a read: tests/contract/test_prefix_fetch.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import BLOCK, Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import Answer, ask, ask_all, assert_right, random_prompt
from tests.support.waiting import patience

pytestmark = pytest.mark.engine

STEPS = 4
LEAST = 2 * BLOCK
READ = "decode.before_read"


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pair"), model_path, kv_mib=16) as made:
        yield made.start("decode", "decode", "frontend")


@pytest.fixture
def cluster(pair: Cluster) -> Iterator[Cluster]:
    """Two living decode workers, that take turns."""
    while len(pair.of("decode")) < 2:
        pair.add("decode")
    pair.set_router(min_fetch_tokens=LEAST, decode_policy="round_robin")
    yield pair
    for worker in pair.of("decode"):
        worker.arm("")
    pair.assert_clean()
    wrong = pair.counter("pullfill_prefix_gaps_total", what="differences")
    assert not wrong, "events told other blocks than the cache has"


def known(cluster: Cluster) -> dict[str, int]:
    """Wait until the frontend knows all blocks of each decode worker. Returns their numbers.

    Each message that ends a batch of events says how many blocks the worker holds, and their hashes
    xored. A replica that differs is not `warm`. So equal numbers and `warm` mean equal sets."""

    def equal() -> dict[str, int] | None:
        # A killed worker is still listed, without a load.
        known = cluster.full_status()["workers"]
        rows = [row for row in known if row["role"] == "decode" and row["load"]]
        pairs = [(row["routing"]["prefix"], row["load"]["prefix"]) for row in rows]
        if any(p["state"] != "warm" or p["blocks"] != own["blocks"] for p, own in pairs):
            return None
        return {row["instance_id"]: p["blocks"] for row, (p, _) in zip(rows, pairs, strict=True)}

    found: dict[str, int] = until(equal, 20, "the frontend knows the blocks")
    return found


class Talk:
    """A conversation: its prompt grows by the answer and the next question."""

    def __init__(self, cluster: Cluster, oracle: Oracle, seed: int, length: int = 700) -> None:
        self.cluster, self.oracle, self.seed = cluster, oracle, seed
        self.prompt = random_prompt(length, seed)
        self.told: dict[str, Any] = {}
        self.holder = self.asker = cluster.of("decode")[0]

    def first(self) -> None:
        """Have one worker compute the prompt, and wait until the frontend knows."""
        before, blocks = known(self.cluster), len(self.prompt) // BLOCK
        self.turn()
        where = self.told["decode_instance"]
        until(lambda: known(self.cluster)[where] >= before[where] + blocks, 20, "new blocks")
        names = {worker.instance_id: worker for worker in self.cluster.of("decode")}
        self.holder = names.pop(where)
        (self.asker,) = names.values()

    def turn(self) -> Answer:
        """Ask, check the tokens, and go on from there."""
        answer = ask(self.cluster, self.prompt, STEPS)
        assert_right(self.oracle, [self.prompt], [answer], STEPS)
        self.told = self.cluster.explain(answer.request_id)
        self.prompt = [*self.prompt, *answer.tokens, *random_prompt(20, self.seed + 1)]
        return answer


@pytest.mark.essential
def test_turns_go_where_their_prefix_is_until_that_worker_is_gone(
    cluster: Cluster, oracle: Oracle
) -> None:
    cluster.set_router(decode_policy="kv")
    talks = [Talk(cluster, oracle, seed, 150) for seed in range(4)]
    for talk in talks:
        talk.turn()
    places = [talk.told["decode_instance"] for talk in talks]
    assert len(set(places)) == 2, "new conversations use both workers"
    for _ in range(2):
        for talk, place in zip(talks, places, strict=True):
            known(cluster)
            before = len(talk.prompt)
            talk.turn()
            choice = talk.told["decode_choice"]
            assert talk.told["decode_instance"] == place
            assert (choice["policy"], choice["reason"]) == ("kv", "prefix")
            assert before - 60 < choice["matched_tokens"] <= talk.told["prefix_hit_tokens"] + 16
            assert choice["score"] > 0
    victim = next(w for w in cluster.of("decode") if w.instance_id == places[0])
    victim.kill()
    for talk in talks:
        talk.turn()
        assert talk.told["decode_instance"] not in ("", victim.instance_id)
    assert cluster.counter("pullfill_decode_choice_total", policy="kv", reason="prefix") >= 4


@pytest.mark.essential
def test_a_frontend_that_starts_again_is_told_all_blocks(cluster: Cluster) -> None:
    new = sum(known(cluster).values()) + 6 * ((300 + STEPS - 1) // BLOCK)
    ask_all(cluster, [random_prompt(300, seed=i) for i in range(6)], STEPS)
    until(lambda: sum(known(cluster).values()) >= new, 20, "new blocks")
    before = known(cluster)
    (frontend,) = cluster.of("frontend")
    frontend.stop()
    cluster.launch("frontend")
    cluster.wait_ready(*[worker for worker in cluster.workers if worker.alive])
    assert known(cluster) == before
    assert cluster.counter("pullfill_prefix_index_blocks") == sum(before.values())
    assert cluster.counter("pullfill_prefix_missing_workers") == 0
    assert cluster.counter("pullfill_prefix_gaps_total", what="differences") == 0


@pytest.mark.parametrize("length", [LEAST + BLOCK + 3, 2000])
@pytest.mark.essential
def test_a_prompt_that_moves_is_not_computed_again(
    cluster: Cluster, oracle: Oracle, length: int
) -> None:
    talk = Talk(cluster, oracle, seed=10 + length, length=length)
    talk.first()
    assert (talk.told["fetched_tokens"], talk.told["fetch"]) == (0, None)
    for _ in range(3):
        before, held_by = len(talk.prompt), talk.told["decode_instance"]
        talk.turn()
        told = talk.told
        assert told["decode_instance"] != held_by
        had = told["prefix_hit_tokens"]
        wanted = (before - 24) // BLOCK * BLOCK
        if wanted - had < LEAST:
            break  # this worker has computed an earlier turn
        assert told["fetch"] == "fetched"
        assert told["fetched_from"] == held_by
        assert told["fetched_tokens"] >= 0.8 * (wanted - had)
        assert told["transport"] == "shm"
        assert told["kv_bytes"] > 0
        assert told["timings_ms"]["fetch"] > 0
        assert (told["path"], told["reason"]) == ("local", "prefix_hit")
    assert cluster.counter("pullfill_prefix_fetch_total", outcome="fetched") > 0


@pytest.mark.parametrize(
    "point",
    [
        READ,
        pytest.param("decode.before_lease", marks=pytest.mark.long),
        pytest.param("decode.before_lease_end", marks=pytest.mark.long),
    ],
)
@pytest.mark.essential
def test_a_holder_that_is_killed_in_the_middle(
    cluster: Cluster, oracle: Oracle, point: str
) -> None:
    talk = Talk(cluster, oracle, seed=700 + len(point))
    talk.first()
    if point == READ:
        thread = threading.Thread(target=talk.turn)
        talk.asker.hold(READ, thread.start)
        talk.holder.kill()
        talk.asker.arm("")
        thread.join(patience(30.0))
        assert not thread.is_alive()
    else:
        talk.holder.arm(f"{point}=kill@1")
        talk.turn()
        assert not talk.holder.alive
    assert talk.told["fetched_tokens"] == 0
    assert talk.told["fetch"] in ("unreachable", "lost", "expired")
