"""Two decode workers with real engines: prompts that move take their prefix along.

The tokens of every answer are those of one plain engine, also when the holder of the prefix is
killed or has to evict blocks in the middle of a read. Other ends of a read:
tests/contract/test_prefix_fetch*.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import BLOCK, Cluster, until
from tests.support.oracle import Oracle
from tests.support.prefix_events import BlocksOf
from tests.support.prompts import Answer, ask, random_prompt, truth

pytestmark = pytest.mark.engine

STEPS = 4
LEAST = 2 * BLOCK
READ = "decode.before_read"


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("fetch"), model_path, kv_mib=16) as made:
        yield made.start("decode", "decode", "frontend")


@pytest.fixture
def cluster(pair: Cluster) -> Iterator[Cluster]:
    """Two living decode workers, that take turns."""
    while len(pair.of("decode")) < 2:
        pair.wait_ready(pair.launch("decode"))
    pair.set_router(min_fetch_tokens=LEAST)
    yield pair
    for worker in pair.of("decode"):
        worker.arm("")
    pair.assert_clean()


class Turns:
    """A conversation whose turns go to the two workers in turn."""

    def __init__(self, cluster: Cluster, oracle: Oracle, seed: int, length: int = 700) -> None:
        self.cluster, self.oracle, self.seed = cluster, oracle, seed
        self.prompt = random_prompt(length, seed)
        self.told: dict[str, Any] = {}
        self.holder = self.asker = cluster.of("decode")[0]

    def first(self) -> None:
        """Have one worker compute the prompt, and wait until the frontend knows."""
        blocks = BlocksOf(self.cluster)
        self.turn()
        names = {worker.instance_id: worker for worker in self.cluster.of("decode")}
        self.holder = names.pop(self.told["decode_instance"])
        (self.asker,) = names.values()
        blocks.wait(self.holder.instance_id)

    def turn(self) -> Answer:
        """Ask, check the tokens, and go on from there."""
        answer = ask(self.cluster, self.prompt, STEPS)
        ((tokens, _),) = truth(self.oracle, [self.prompt], STEPS)
        assert answer.tokens == tokens
        self.told = self.cluster.explain(answer.request_id)
        self.prompt = [*self.prompt, *answer.tokens, *random_prompt(20, self.seed + 1)]
        return answer

    def arm(self) -> Callable[[], bool]:
        """Make the next turn stop before its read. Returns a function: whether it has stopped."""
        line = f"failpoint {READ} acts: hold".encode()
        before = self.asker.log.read_bytes().count(line)
        self.asker.arm(f"{READ}=hold@1")
        return lambda: self.asker.log.read_bytes().count(line) > before

    def held(self) -> threading.Thread:
        """Ask the next turn, and return when it has stopped before its read. Returns its thread."""
        held = self.arm()
        thread = threading.Thread(target=self.turn)
        thread.start()
        until(held, 20.0, "held")
        return thread

    def go(self, thread: threading.Thread) -> None:
        self.asker.arm("")
        thread.join(30.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("length", [LEAST + BLOCK + 3, 700, 2000])
@pytest.mark.essential
def test_a_prompt_that_moves_is_not_computed_again(
    cluster: Cluster, oracle: Oracle, length: int
) -> None:
    talk = Turns(cluster, oracle, seed=10 + length, length=length)
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
        length = before
    assert cluster.counter("pullfill_prefix_fetch_total", outcome="fetched") > 0


def test_nothing_is_fetched_if_the_setting_is_off_or_the_salt_differs(
    cluster: Cluster, oracle: Oracle
) -> None:
    talk = Turns(cluster, oracle, seed=100)
    talk.first()
    salted = ask(cluster, talk.prompt, STEPS, cache_salt="other")
    told = cluster.explain(salted.request_id)
    assert (told["fetch"], told["prefix_hit_tokens"]) == (None, 0)
    ask(cluster, random_prompt(5, seed=101), STEPS)
    cluster.set_router(min_fetch_tokens=0)
    talk.turn()
    assert (talk.told["fetch"], talk.told["fetched_tokens"]) == (None, 0)


def test_leased_blocks_are_not_evicted(cluster: Cluster, oracle: Oracle) -> None:
    talk = Turns(cluster, oracle, seed=200)
    talk.first()
    thread = talk.held()
    blocks = cluster.load_of(talk.holder)["kv_blocks"]
    for seed in range(2 * blocks * BLOCK // 1500 + 2):  # more than both caches hold
        ask(cluster, random_prompt(1500, seed=300 + seed), 1)
    assert cluster.load_of(talk.holder)["read_leases"] == 1
    talk.go(thread)
    assert talk.told["fetch"] == "fetched"


@pytest.mark.parametrize("point", [READ, "decode.before_lease", "decode.before_lease_end"])
@pytest.mark.essential
def test_a_holder_that_is_killed_in_the_middle(
    cluster: Cluster, oracle: Oracle, point: str
) -> None:
    talk = Turns(cluster, oracle, seed=700 + len(point))
    talk.first()
    if point == READ:
        thread = talk.held()
        talk.holder.kill()
        talk.go(thread)
    else:
        talk.holder.arm(f"{point}=kill@1")
        talk.turn()
        assert not talk.holder.alive
    assert talk.told["fetched_tokens"] == 0
    assert talk.told["fetch"] in ("unreachable", "lost", "expired")
