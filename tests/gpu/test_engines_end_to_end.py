"""Engines as vLLM starts them by default on a GPU (compiled steps, CUDA graphs), with drafts, and
with a model that has multi-head latent attention (MLA). KV goes over cuda_ipc."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.drafts import SPECULATE
from tests.support.gpu_pairs import STEPS, gpu_pair, plain_engine
from tests.support.oracle import Oracle
from tests.support.prompts import ask, ask_all, assert_right, forget_decode_prefixes, random_prompt
from tests.support.zoo import ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

SIZES = [1, 2, 4, 8, 16]
ENGINES = {
    "compiled": (
        "--no-enforce-eager",
        f"--compilation-config={json.dumps({'cudagraph_capture_sizes': SIZES})}",
    ),
    "graphs": (
        "--no-enforce-eager",
        "--compilation-config="
        + json.dumps(
            {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
        ),
    ),
    "drafts": (SPECULATE,),
}
"""Flags of both workers. The engine to compare with computes eagerly and without drafts."""
LENGTHS = 3, 32, 33, 64, 200, 513, 1025, 2000
ROUNDING = 0.1
"""Largest difference of the log probabilities of a first token in bfloat16. A wrong rotary
embedding makes a difference of 3 and more in float32."""


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[Oracle]:
    with plain_engine(model_path) as engine:
        yield engine


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_tokens_with_other_engines(
    engine: str, plain: Oracle, model_path: Path, tmp_path: Path
) -> None:
    """Prefilled locally and remotely: one after the other, then many at once."""
    with gpu_pair(tmp_path, model_path, *ENGINES[engine]) as pair:
        for seed, (policy, path) in enumerate(
            [("always_local", "local"), ("always_remote", "remote")], 41
        ):
            pair.set_router(policy=policy)
            prompts = [random_prompt(length, seed=seed) for length in LENGTHS]
            answers = [ask(pair, prompt, STEPS) for prompt in prompts]
            more = [random_prompt(length, seed=seed + 10) for length in LENGTHS] * 2
            answers += ask_all(pair, more, STEPS, at_once=16)
            told = [pair.explain(answer.request_id) for answer in answers[: len(prompts)]]
            assert [t["path"] for t in told] == [path] * len(prompts), told
            assert_right(plain, prompts + more, answers, STEPS)
        pair.assert_clean()


def test_an_mla_model_gives_the_same_probabilities_after_a_remote_prefill(tmp_path: Path) -> None:
    """In bfloat16, as vLLM has no MLA kernel for float32 on a GPU. Its layers have no experts."""
    model = ZOO["DeepSeek-V3"]
    dense = replace(model, fields=model.fields | {"first_k_dense_replace": 4}).checkpoint()
    flags = "--dtype=bfloat16", "--attention-backend=FLASH_ATTN_MLA"
    with gpu_pair(tmp_path, dense, *flags) as pair:
        prompts = [random_prompt(length, seed=61) for length in LENGTHS]
        pair.set_router(policy="always_local")
        local = [ask(pair, prompt, STEPS) for prompt in prompts]
        forget_decode_prefixes(pair)
        pair.set_router(policy="always_remote")
        remote = [ask(pair, prompt, STEPS) for prompt in prompts]
        told = [pair.explain(answer.request_id) for answer in remote]
        assert {t["path"] for t in told} == {"remote"}, told
        assert pair.counter("pullfill_self_check_total", result="passed") == 1
        first = [answer.logprobs[0] for answer in remote]
        assert first == pytest.approx([answer.logprobs[0] for answer in local], abs=ROUNDING)
        pair.assert_clean()
