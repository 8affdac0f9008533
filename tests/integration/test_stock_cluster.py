"""A frontend of ours in front of workers that are all stock `vllm serve` with one flag.

`make chaos` also runs the fault tests with such workers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.answers import ask_for
from tests.support.cluster import Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import ask_all, assert_right, random_prompt, truth

pytestmark = pytest.mark.engine

STEPS = 6
LENGTHS = [1, 31, 32, 33, 65, 200, 512, 513, 1023, 1999]


@pytest.fixture(scope="module")
def stock_cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    both = frozenset({"decode", "prefill"})
    with Cluster(tmp_path_factory.mktemp("cluster"), model_path, stock=both) as cluster:
        yield cluster.start(policy="always_remote", max_queue_wait_s=3600)


@pytest.mark.essential
def test_every_prompt_is_prefilled_remotely(stock_cluster: Cluster, oracle: Oracle) -> None:
    prompts = [random_prompt(length, seed=90) for length in LENGTHS]
    answers = ask_all(stock_cluster, prompts, STEPS)
    assert_right(oracle, prompts, answers, STEPS, 1e-5)
    longer = [prompt + random_prompt(300, seed=91) for prompt in prompts]
    answers += ask_all(stock_cluster, longer, STEPS)
    assert_right(oracle, longer, answers[len(prompts) :], STEPS, 1e-5)
    # One token is computed where it is sampled.
    paths = [stock_cluster.explain(answer.request_id)["path"] for answer in answers]
    assert paths == ["local", *["remote"] * (len(answers) - 1)]
    stock_cluster.assert_clean()


def test_a_prefill_worker_that_is_told_to_end_finishes_its_job(
    stock_cluster: Cluster, oracle: Oracle
) -> None:
    """vLLM has no request then: the KV is written, and the job not committed."""
    (other,) = stock_cluster.of("prefill")
    leaving = stock_cluster.add("prefill")
    other.signal(signal.SIGSTOP)
    try:
        # Longer than vLLM's end waits for a worker that has nothing to finish.
        leaving.arm("prefill.before_commit=sleep:5@1")
        prompt = random_prompt(900, seed=93)
        answer = ask_for(stock_cluster, prompt, STEPS)
        until(lambda: "before_commit acts" in leaving.log.read_text(), 20, "it is there")
        leaving.signal(signal.SIGTERM)
        assert answer.done.wait(60)
    finally:
        other.signal(signal.SIGCONT)
    assert (answer.error, answer.tokens) == ("", truth(oracle, [prompt], STEPS)[0][0])
    told = stock_cluster.explain(answer.request_id)
    assert (told["path"], told["attempts"]) == ("remote", 1)
    assert told["prefill_instance"] == leaving.instance_id
    leaving.wait(20)
    stock_cluster.assert_clean()


@pytest.mark.essential
def test_a_stream_goes_on_at_another_worker_when_its_own_dies(
    stock_cluster: Cluster, oracle: Oracle
) -> None:
    (dying,) = stock_cluster.of("decode")
    survivor = stock_cluster.add("decode")
    prompts, steps = [random_prompt(300 + number, seed=92) for number in range(2)], 200
    dying.arm("engine.step=sleep:0.02")
    answers = [ask_for(stock_cluster, prompt, steps) for prompt in prompts]  # one for each worker
    until(lambda: all(answer.tokens for answer in answers), 20, "they are under way")
    dying.signal(signal.SIGKILL)
    assert all(answer.done.wait(60) for answer in answers)
    assert [answer.error for answer in answers] == ["", ""]
    assert [answer.tokens for answer in answers] == [t for t, _ in truth(oracle, prompts, steps)]
    told = [stock_cluster.explain(answer.request_id) for answer in answers]
    assert sorted(one["migrated_from"] for one in told) == [[], [dying.instance_id]]
    assert {one["decode_instance"] for one in told} == {survivor.instance_id}
