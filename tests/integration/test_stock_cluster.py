"""A frontend of ours in front of workers that are all stock `vllm serve` with one flag.

`make chaos` also runs the fault tests, and models of the zoo, with such workers: with all of them,
and with stock prefill workers beside decode workers of our own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.support.answers import ask_for
from tests.support.cluster import Cluster, StockWorker, Worker, until
from tests.support.oracle import Oracle
from tests.support.prompts import ask, ask_all, assert_right, random_prompt, truth

pytestmark = pytest.mark.engine

STEPS = 6
LENGTHS = [1, 31, 32, 33, 65, 200, 512, 513, 1023, 1999]
BOTH = frozenset({"decode", "prefill"})
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def stock_cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), model_path, stock=BOTH) as cluster:
        yield cluster.start(policy="always_remote", max_queue_wait_s=3600)


@pytest.mark.essential
def test_every_prompt_is_prefilled_remotely(stock_cluster: Cluster, oracle: Oracle) -> None:
    prompts = [random_prompt(length, seed=90) for length in LENGTHS]
    answers = ask_all(stock_cluster, prompts, STEPS)
    assert_right(oracle, prompts, answers, STEPS, 1e-5)
    longer = [prompt + random_prompt(300, seed=91) for prompt in prompts]
    answers += ask_all(stock_cluster, longer, STEPS)
    assert_right(oracle, longer, answers[len(prompts) :], STEPS, 1e-5)
    for prompt in [random_prompt(length, seed=95) for length in (65, 200)]:
        answers.append(ask(stock_cluster, prompt, STEPS, **SEEDED))
        ((tokens, _),) = truth(oracle, [prompt], STEPS, **SEEDED)
        assert answers[-1].tokens == tokens
    # One token is computed where it is sampled.
    paths = [stock_cluster.explain(answer.request_id)["path"] for answer in answers]
    assert paths == ["local", *["remote"] * (len(answers) - 1)]
    stock_cluster.assert_clean()


def test_a_prefill_worker_that_is_told_to_end_finishes_its_job(
    stock_cluster: Cluster, oracle: Oracle
) -> None:
    """It is told when its KV is written, but the job is not committed. vLLM has no request then."""
    stock_cluster.add("prefill")
    # Either may take the job: both wait at the queue.
    workers = stock_cluster.of("prefill")
    for one in workers:
        # Longer than vLLM's end waits for a worker that has nothing to finish: 3 s. Shorter than
        # the silence after which a decode worker goes on without it: 5 s.
        one.arm("prefill.before_commit=sleep:4@1")
    prompt = random_prompt(900, seed=93)
    answer = ask_for(stock_cluster, prompt, STEPS)

    def at_work() -> list[Worker]:
        return [one for one in workers if "before_commit acts" in one.log.read_text()]

    until(at_work, 20, "it is there")
    (leaving,) = at_work()
    leaving.signal(signal.SIGTERM)
    assert answer.done.wait(60)
    for one in workers:
        one.arm("")
    assert (answer.error, answer.tokens) == ("", truth(oracle, [prompt], STEPS)[0][0])
    told = stock_cluster.explain(answer.request_id)
    assert (told["path"], told["fallback"], told["attempts"]) == ("remote", None, 1)
    assert told["prefill_instance"] == leaving.instance_id
    leaving.wait(20)
    stock_cluster.assert_clean()


@pytest.mark.essential
def test_a_stream_goes_on_at_another_worker_when_its_own_dies(
    stock_cluster: Cluster, oracle: Oracle
) -> None:
    """Who speaks to vLLM's own server is told."""
    (dying,) = stock_cluster.of("decode")
    assert isinstance(dying, StockWorker)
    url = f"http://127.0.0.1:{dying.port}/v1"
    direct = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    survivor = stock_cluster.add("decode")
    prompts, steps = [random_prompt(300 + number, seed=92) for number in range(2)], 80
    dying.arm("engine.step=sleep:0.1")
    answers = [ask_for(stock_cluster, prompt, steps) for prompt in prompts]  # one for each worker
    told = ask_for(SimpleNamespace(client=lambda: direct), random_prompt(40, seed=94), 2000)
    until(lambda: all(one.tokens for one in (*answers, told)), 20, "they are under way")
    os.kill(dying.pid, signal.SIGKILL)  # the engine, and not its server
    assert all(one.done.wait(60) for one in (*answers, told))
    direct.close()
    assert told.error  # vLLM 0.33 does not tell of what
    assert [answer.error for answer in answers] == ["", ""]
    assert [answer.tokens for answer in answers] == [t for t, _ in truth(oracle, prompts, steps)]
    paths = [stock_cluster.explain(answer.request_id) for answer in answers]
    assert sorted(one["migrated_from"] for one in paths) == [[], [dying.instance_id]]
    assert {one["decode_instance"] for one in paths} == {survivor.instance_id}
