"""Each architecture of the zoo: a cluster answers as one plain engine does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pullfill.engine import release
from tests.integration.test_joining import last_error
from tests.support.drafts import FEW
from tests.support.lora import lora_adapter
from tests.support.oracle import Oracle
from tests.support.prompts import (
    ask,
    ask_all,
    forget_decode_prefixes,
    going_away,
    random_prompt,
)
from tests.support.served import STEPS, TOLERANCE, Served, serving
from tests.support.zoo import ZOO

pytestmark = pytest.mark.engine

SHORT_PROMPTS = (2, 33, 90, 200)
LENGTHS = (*SHORT_PROMPTS, 700, 1500)
ADAPTER = "adapter"
KV_WORKERS = ("decode", "prefill")
SHORT = ("Gemma 3",)
"""The others are asked by `make zoo`."""
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3,
    "prompt_lookup_max": 4, "prompt_lookup_min": 1,
}  # fmt: skip
SPECULATE = f"--speculative-config={json.dumps(NGRAM)}"
REPEATING = {"allowed_token_ids": list(FEW)}
"""Answers of so few tokens repeat themselves, so some drafts are accepted."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in ZOO],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    if ZOO[request.param].missing:
        pytest.skip(ZOO[request.param].missing)
    directory = tmp_path_factory.mktemp("zoo")
    flags: tuple[str, ...] = ()
    front: tuple[str, ...] = (SPECULATE,)  # to count drafts
    if not ZOO[request.param].lora:
        path = ZOO[request.param].checkpoint()
        adapter = lora_adapter(tmp_path_factory.mktemp("adapter") / ADAPTER, path, seed=0)
        flags = ("--enable-lora", "--max-loras=2")
        front += ("--lora-modules", f"{ADAPTER}={adapter}")
    with serving(request.param, directory, flags=flags, front=front) as served:
        yield served


@pytest.mark.essential
def test_cold(served: Served) -> None:
    cluster = served.cluster
    for record in [*cluster.records("decode").values(), *cluster.records("prefill").values()]:
        assert record.compat is not None
        assert len(record.compat.kv_groups.split()) == served.model.groups
    cold = [random_prompt(length, seed=1) for length in SHORT_PROMPTS]
    answers = [ask(cluster, prompt, STEPS) for prompt in cold]
    served.check_alone(cold, answers)
    served.check_paths(answers)
    served.check_bytes(cold, answers)
    assert len({tuple(answer.tokens) for answer in answers}) > len(cold) // 2, "prompts matter"


def test_chunked(served: Served) -> None:
    prompts = [random_prompt(length, seed=8) for length in (700, 1100, 1500)]
    answers = ask_all(served.cluster, prompts, STEPS)
    served.check(prompts, answers)
    served.check_paths(answers)


def test_hit(served: Served) -> None:
    cluster = served.cluster
    heads = [random_prompt(length, seed=1) for length in LENGTHS]
    ask_all(cluster, heads, STEPS)
    longer = [prompt + random_prompt(130, seed=2) for prompt in heads]
    served.check(longer, ask_all(cluster, longer, STEPS))  # a hit on both sides
    forget_decode_prefixes(cluster)
    longest = [prompt + random_prompt(60, seed=3) for prompt in longer]
    answers = ask_all(cluster, longest, STEPS)  # a hit on the prefill side only
    served.check(longest, answers)
    served.check_paths(answers)

    cluster.set_router(policy="always_local")
    heads = [random_prompt(length, seed=4) for length in (64, 300, 900)]
    served.check(heads, ask_all(cluster, heads, STEPS))
    cluster.set_router(policy="always_remote")
    read_before = cluster.counter("pullfill_kv_read_bytes_total")
    tails = [head + random_prompt(more, seed=5) for head in heads for more in (40, 300)]
    answers = ask_all(cluster, tails, STEPS)  # a hit on the decode side only
    served.check(tails, answers)
    served.check_paths(answers)
    if served.model.caches:
        assert cluster.counter("pullfill_kv_read_bytes_total") > read_before


def test_lora(served: Served) -> None:
    if served.model.lora:
        pytest.skip(served.model.lora)
    cluster = served.cluster
    prompts = [random_prompt(length, seed=9) for length in (90, 700)]
    ask(cluster, prompts[0][:5], model=ADAPTER)  # loads it
    remote = [ask(cluster, prompt, STEPS, model=ADAPTER) for prompt in prompts]
    served.check_paths(remote)
    cluster.set_router(policy="always_local")
    forget_decode_prefixes(cluster)
    local = [ask(cluster, prompt, STEPS, model=ADAPTER) for prompt in prompts]
    plain = ask_all(cluster, prompts, STEPS)
    cluster.set_router(policy="always_remote")
    for mine, same, other in zip(remote, local, plain, strict=True):
        assert mine.logprobs != pytest.approx(other.logprobs, abs=TOLERANCE)
        if served.model.dtype == "float32":
            assert mine.tokens == same.tokens
            assert mine.logprobs == pytest.approx(same.logprobs, abs=TOLERANCE)


def test_cancelled(served: Served) -> None:
    with going_away(served.cluster, random_prompt(1800, seed=6)):
        pass
    served.cluster.assert_clean()
    prompts = [random_prompt(200, seed=6)]
    served.check(prompts, [ask(served.cluster, prompts[0], STEPS)])


@pytest.mark.essential
def test_killed(served: Served) -> None:
    """The decode worker computes what its prefill worker did not."""
    cluster = served.cluster
    prompts = [random_prompt(length, seed=7) for length in (700, 1100)]
    if served.model.dtype == "float32":
        kill_prefill(served)
        served.check(prompts, ask_all(cluster, prompts, STEPS))
    else:  # prompts that share steps are cut at tokens that the test does not know
        for prompt in prompts:
            kill_prefill(served)
            served.check_alone([prompt], [ask(cluster, prompt, STEPS)])
    assert cluster.of("prefill") == [] or served.model.local
    cluster.assert_clean()


def kill_prefill(served: Served) -> None:
    """Let the prefill worker die at its next commit. Starts one if there is none."""
    cluster = served.cluster
    if not cluster.of("prefill"):
        cluster.wait_ready(served.launch("prefill"))
    cluster.of("prefill")[0].arm("prefill.before_commit=kill@1")


@pytest.mark.long
def test_tp2(served: Served) -> None:
    """The prefill worker has two ranks. If that keeps prompts local, the decode worker has too."""
    local = served.model.local_with_flags
    served.renew(KV_WORKERS if local else ["prefill"], "--tensor-parallel-size=2")
    prompts = [random_prompt(length, seed=10) for length in LENGTHS]
    answers = ask_all(served.cluster, prompts, STEPS)
    served.check(prompts, answers)
    served.check_paths(answers, flags=True)
    longer = [prompt + random_prompt(130, seed=11) for prompt in prompts]
    served.check(longer, ask_all(served.cluster, longer, STEPS))  # a hit on both sides
    served.cluster.assert_clean()


@pytest.mark.long
def test_spec(served: Served) -> None:
    """The last test of a model. The plain engine speculates too.

    vLLM's CPU kernel for MLA rounds several tokens of a request in another way than one. So log
    probabilities of one engine with and without speculation may differ by more than TOLERANCE."""
    if not release.this.speculates_on_cpu:
        pytest.skip("vLLM 0.30 dies of its first draft on CPU, so pullfill refuses the flag")
    cluster, steps = served.cluster, 24
    if served.model.speculation:
        refused = cluster.launch("prefill", SPECULATE)
        assert served.model.speculation in last_error(refused)
        cluster.workers.remove(refused)
        pytest.skip(served.model.speculation)
    served.renew(KV_WORKERS, SPECULATE)
    prompts = [random_prompt(length, seed=12) for length in (3, *LENGTHS[1:])]
    answers = [ask(cluster, prompt, steps, **REPEATING) for prompt in prompts]
    served.check_paths(answers, flags=True)
    assert cluster.counter("vllm:spec_decode_num_accepted_tokens_total") > 0
    path = served.model.checkpoint()
    with Oracle(path, **served.plain, speculative_config=NGRAM) as oracle:
        replace(served, oracle=oracle).check(prompts, answers, steps, **REPEATING)
    cluster.assert_clean()
