"""Two decode workers: which of them gets a prompt, with vLLM's own prefix cache at each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, pullfill, until
from tests.support.prompts import ask, random_prompt

pytestmark = pytest.mark.engine

STEPS = 4
TURN = 150


@pytest.fixture
def cluster(model_path: Path, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, model_path)
    try:
        made.start(decode=2, prefill=0)
        _set_policy(made, "kv")
        yield made
    finally:
        made.stop()


class Conversation:
    """Its prompt grows by the answer and the next question."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self.prompt: list[int] = []

    def turn(self) -> dict[str, Any]:
        """Ask, and return what `pullfill explain` says of it."""
        self._seed += 1000
        self.prompt += random_prompt(TURN, seed=self._seed)
        answer = ask(self._cluster, self.prompt, STEPS)
        told = self._cluster.explain(answer.request_id)
        self.prompt += answer.tokens
        return told


def all_warm(cluster: Cluster) -> bool:
    """Whether the frontend knows all blocks of every decode worker."""
    rows = [row for row in cluster.status()["workers"] if row["role"] == "decode"]
    return all(row["routing"]["prefix"]["state"] == "warm" for row in rows)


@pytest.mark.essential
def test_turns_go_where_their_prefix_is_until_that_worker_is_gone(cluster: Cluster) -> None:
    talks = [Conversation(cluster, seed) for seed in range(4)]
    places = [talk.turn()["decode_instance"] for talk in talks]
    assert len(set(places)) == 2, "new conversations use both workers"
    for _ in range(2):
        for talk, place in zip(talks, places, strict=True):
            before = len(talk.prompt)
            told = talk.turn()
            choice = told["decode_choice"]
            assert told["decode_instance"] == place
            assert (choice["policy"], choice["reason"]) == ("kv", "prefix")
            assert before - 40 < choice["matched_tokens"] <= told["prefix_hit_tokens"] + 16
            assert choice["score"] > 0

    # A frontend that starts now has sent nothing: it knows the blocks from the workers alone.
    cluster.launch("frontend")
    cluster.wait_ready(*cluster.workers)
    until(lambda: all_warm(cluster), 20.0, "it knows the blocks of both")
    cluster._close_client()
    for talk, place in zip(talks, places, strict=True):
        told = talk.turn()
        assert (told["decode_instance"], told["decode_choice"]["reason"]) == (place, "prefix")

    victim = next(w for w in cluster.of("decode") if w.instance_id == places[0])
    victim.kill()
    for talk in talks:
        assert talk.turn()["decode_instance"] not in ("", victim.instance_id)
    assert cluster.counter("pullfill_decode_choice_total", policy="kv", reason="prefix") >= 4


@pytest.mark.long
def test_the_policy_changes_while_the_cluster_runs(cluster: Cluster) -> None:
    talk = Conversation(cluster, 50)
    assert len({talk.turn()["decode_instance"] for _ in range(3)}) == 1
    _set_policy(cluster, "round_robin")
    told = [talk.turn() for _ in range(4)]
    assert [t["decode_choice"]["reason"] for t in told] == ["turn"] * 4
    turns = [t["decode_instance"] for t in told]
    assert turns[0] != turns[1]
    assert turns[:2] == turns[2:]
    _set_policy(cluster, "kv")
    assert talk.turn()["decode_instance"] == turns[-1]


def _set_policy(cluster: Cluster, policy: str) -> None:
    done = pullfill(cluster, "config", "set", "router.decode_policy", policy)
    assert done.returncode == 0, done.stdout + done.stderr
    (frontend,) = cluster.of("frontend")
    until(lambda: frontend.router.decode_policy == policy, 10.0, "the frontend follows")
