"""Decode workers that send requests to better ones, because a frontend was wrong about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pullfill import wire
from pullfill.engine import check, front_wire
from tests.support.cluster import MODEL, Cluster, Worker, until
from tests.support.oracle import Oracle
from tests.support.prompts import ask, random_prompt, truth

pytestmark = pytest.mark.engine

STEPS = 6


@pytest.fixture
def cluster(model_path: Path, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, model_path)
    try:
        yield made.start(decode=2, prefill=0)
    finally:
        made.stop()


def set_policy(cluster: Cluster, policy: str) -> None:
    cluster.set_router(decode_policy=policy)
    for frontend in cluster.of("frontend"):
        until(lambda f=frontend: f.router.decode_policy == policy, 20.0, "the frontend follows")


def served(cluster: Cluster, prompt: list[int], oracle: Oracle | None = None) -> dict[str, Any]:
    """Ask, and return what `pullfill explain` says. oracle: knows the right tokens."""
    answer = ask(cluster, prompt, STEPS)
    if oracle is not None:
        assert answer.tokens == truth(oracle, [prompt], STEPS)[0][0]
    return cluster.explain(answer.request_id)


def worker_of(cluster: Cluster, instance_id: str) -> Worker:
    return next(w for w in cluster.of("decode") if w.instance_id == instance_id)


def known_blocks(cluster: Cluster, instance_id: str) -> int:
    """How many blocks the frontend believes to be cached at a decode worker."""
    rows = {row["instance_id"]: row for row in cluster.status()["workers"]}
    return int(rows[instance_id]["routing"]["prefix"]["blocks"])


def forget_prefixes(cluster: Cluster, instance_id: str) -> None:
    """Empty the prefix cache of one decode worker, as a frontend could. The real frontends learn
    what is gone a moment later."""
    hello = front_wire.FrontendHello(
        frontend_instance="test", vllm_version=check.require_version(), model=MODEL
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(cluster.records("decode")[instance_id].data)
        socket.send_multipart([front_wire.HELO, wire.encode(hello)])
        assert socket.recv_multipart()[0] == front_wire.HELO
        call = msgspec.msgpack.encode((1, "reset_prefix_cache", []))
        socket.send_multipart([front_wire.UTIL, call])
        while socket.recv_multipart()[0] != front_wire.OUT:
            pass


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_a_worker_without_the_prefix_sends_the_prompt_to_the_one_that_has_it(
    cluster: Cluster, oracle: Oracle, dies: bool
) -> None:
    """dies: that one dies as soon as it gets the prompt, which comes back then."""
    prefix = random_prompt(1200, seed=1)
    prompts = [prefix + random_prompt(40, seed=n) for n in range(10, 17)]
    assert len({served(cluster, prompt)["decode_instance"] for prompt in prompts[:2]}) == 2
    set_policy(cluster, "kv")
    # Both hold the prefix. The one that has done less work lately gets the next prompt.
    holder = served(cluster, prompts[2])["decode_instance"]
    (empty,) = {w.instance_id for w in cluster.of("decode")} - {holder}
    forget_prefixes(cluster, empty)
    if dies:
        worker_of(cluster, holder).arm("decode.intake=kill@1")
        told = served(cluster, prompts[3], oracle)
        assert (told["redirected_from"], told["redirect_reason"]) == (empty, "prefix_gone")
        assert (told["decode_instance"], told["migrated_from"]) == (empty, [holder])
        assert cluster.counter("pullfill_redirect_total") == 1
        return

    first = served(cluster, prompts[3], oracle)
    assert (first["redirected_from"], first["redirect_reason"]) == (empty, "prefix_gone")
    until(lambda: known_blocks(cluster, empty) == 0, 20.0, "the frontend learns what is gone")
    rest = [served(cluster, prompt, oracle) for prompt in prompts[4:]]
    assert [told["redirected_from"] for told in rest] == [None] * 3, "it is not expected any more"
    for told in (first, *rest):
        assert (told["decode_instance"], told["migrated_from"]) == (holder, [])
        assert told["prefix_hit_tokens"] > 1100
    for name, count in (("redirect", 1), ("frontend_resent", 0), ("frontend_failed", 0)):
        assert cluster.counter(f"pullfill_{name}_total") == count
    cluster.assert_clean()
