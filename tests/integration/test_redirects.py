"""Decode workers that send requests to better ones, because a frontend was wrong about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import zmq

from pullfill import wire
from pullfill.engine import check, front_wire
from tests.support import web
from tests.support.cluster import BLOCK, MODEL, Cluster, Worker, until
from tests.support.oracle import Oracle
from tests.support.prompts import Answer, ask, random_prompt, truth

pytestmark = pytest.mark.engine

STEPS = 6
LARGE = 4050
"""Prompts of so many tokens are prepared by the intake thread, even while the engine rests."""


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


def known_blocks(url: str, instance_id: str) -> int:
    """Number of blocks in a decode worker's prefix cache, as the frontend at `url` knows it."""
    status = web.get(f"{url}/pullfill/status", timeout=10.0).json()
    rows = {row["instance_id"]: row for row in status["workers"]}
    return int(rows[instance_id]["routing"]["prefix"]["blocks"])


def wait_known(urls: Sequence[str], instance_id: str, tokens: int) -> None:
    """Wait until each frontend knows that a decode worker has cached so many tokens."""
    for url in urls:

        def known(url: str = url) -> bool:
            return known_blocks(url, instance_id) >= tokens // BLOCK

        until(known, 20.0, "the frontend knows the blocks")


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
    wait_known([cluster.frontend_url], empty, 1200)
    # The frontend must not learn what is gone before the next prompt.
    worker_of(cluster, empty).arm("decode.before_events=hold")
    forget_prefixes(cluster, empty)
    if dies:
        worker_of(cluster, holder).arm("decode.intake=kill@1")
        told = served(cluster, prompts[3], oracle)
        worker_of(cluster, empty).arm("")
        assert (told["redirected_from"], told["redirect_reason"]) == (empty, "prefix_gone")
        assert (told["decode_instance"], told["migrated_from"]) == (empty, [holder])
        assert cluster.counter("pullfill_redirect_total") == 1
        return

    first = served(cluster, prompts[3], oracle)
    worker_of(cluster, empty).arm("")
    assert (first["redirected_from"], first["redirect_reason"]) == (empty, "prefix_gone")
    url = cluster.frontend_url
    until(lambda: known_blocks(url, empty) == 0, 20.0, "the frontend learns what is gone")
    rest = [served(cluster, prompt, oracle) for prompt in prompts[4:]]
    assert [told["redirected_from"] for told in rest] == [None] * 3, "it is not expected any more"
    for told in (first, *rest):
        assert (told["decode_instance"], told["migrated_from"]) == (holder, [])
        assert told["prefix_hit_tokens"] > 1100
    for name, count in (("redirect", 1), ("frontend_resent", 0), ("frontend_failed", 0)):
        assert cluster.counter(f"pullfill_{name}_total") == count
    cluster.assert_clean()


class At:
    """Asks through one of the two frontends, in threads."""

    def __init__(self, cluster: Cluster, url: str, pool: ThreadPoolExecutor) -> None:
        self._cluster = cluster
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._pool = pool

    def ask(self, prompt: list[int]) -> Future[Answer]:
        return self._pool.submit(ask, self._cluster, prompt, STEPS, self._client)


def test_a_queue_that_a_frontend_does_not_know_and_a_drain(
    cluster: Cluster, oracle: Oracle
) -> None:
    urls = [cluster.frontend_url]
    cluster.launch("frontend")
    urls.append(cluster.frontend_url)
    cluster.wait_ready(*cluster.workers)
    set_policy(cluster, "kv")
    prefix = random_prompt(2000, seed=1)
    busy_id = served(cluster, prefix)["decode_instance"]
    wait_known(urls, busy_id, 2000)  # one frontend has not sent that prompt
    busy = worker_of(cluster, busy_id)
    (free_id,) = {w.instance_id for w in cluster.of("decode")} - {busy_id}

    def there(count: int) -> bool:
        return int(cluster.load_of(busy).get("requests", 0)) == count

    with ThreadPoolExecutor(8) as pool:
        one, two = (At(cluster, url, pool) for url in urls)
        assert one.ask(prefix[:1950]).result(30.0).cached_tokens > 1800
        try:
            # What is prepared is not in a load report yet. So the second frontend does not know it.
            busy.arm("decode.intake=hold@1")
            known = [prefix + random_prompt(LARGE - 2000, seed=n) for n in range(20, 23)]
            asked_one = [one.ask(prompt) for prompt in known]
            until(lambda: there(3), 20.0, "three prompts wait to be prepared")
            # The prefix makes that worker look better. But the other one has nothing to do.
            unknown = [prefix[:320] + random_prompt(40, seed=n) for n in range(30, 32)]
            asked_two = [two.ask(prompt) for prompt in unknown]
            until(lambda: there(5), 20.0, "two more wait")
            busy.arm("")
            answers = [future.result(60.0) for future in (*asked_one, *asked_two)]
            right = truth(oracle, [*known, *unknown], STEPS)
            assert [answer.tokens for answer in answers] == [tokens for tokens, _ in right]
            told = [cluster.explain(answer.request_id) for answer in answers]
            assert [t["redirect_reason"] for t in told] == [None] * 3 + ["queue_full"] * 2
            assert [t["redirected_from"] for t in told] == [None] * 3 + [busy_id] * 2
            assert [t["decode_instance"] for t in told] == [busy_id] * 3 + [free_id] * 2

            # A prompt is prepared while the worker begins to drain.
            busy.arm("decode.intake=hold@1")
            prompt = prefix + random_prompt(LARGE - 2000, seed=40)
            asked = two.ask(prompt)
            until(lambda: there(1), 20.0, "it waits to be prepared")
            cluster.revoke_lease(busy)
            drains = f"decode worker {busy_id} drains"
            front = cluster.of("frontend")[1]
            until(lambda: drains in front.log.read_text(), 20.0, "the worker drains")
        finally:
            busy.arm("")
        answer = asked.result(60.0)
        assert answer.tokens == truth(oracle, [prompt], STEPS)[0][0]
        last = cluster.explain(answer.request_id)
        assert (last["decode_instance"], last["redirected_from"]) == (free_id, busy_id)
        assert last["redirect_reason"] == "draining"
    assert busy.process.wait(30.0) == 0
    for reason, count in (("queue_full", 2), ("draining", 1)):
        counted = cluster.counter("pullfill_redirect_total", reason=reason, result="moved")
        assert counted == count
    assert cluster.counter("pullfill_frontend_failed_total") == 0
