"""A model with multi-head latent attention (MLA): its answers are those of transformers, whether
its prompts are prefilled here or remotely."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint import deepseek_checkpoint
from tests.support.cluster import Cluster
from tests.support.prompts import Answer, ask, random_prompt
from tests.support.zoo import LATENT_BYTES

STEPS = 6
LENGTHS = (5, 16, 17, 40, 300, 1100, 3200)
CLOSE = 2e-3
"""Largest difference of two log probabilities. Measured: 2e-4 between vLLM and transformers, 3 and
more with a wrong rotary embedding."""

TRUTH = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
answers = []
with torch.inference_mode():
    for prompt, answer in json.loads(sys.stdin.read()):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        of_answer = [row[token].item() for row, token in zip(logprobs, answer)]
        answers.append([logprobs.max(-1).values.tolist(), of_answer])
print(json.dumps(answers))
"""


@pytest.fixture
def deepseek(tmp_path: Path) -> Iterator[Cluster]:
    # vLLM computes a prompt of this model in one step. On a busy machine the process has no time
    # for the usual 2 s meanwhile, and the prompts of a lost lease are prefilled locally.
    with Cluster(tmp_path, deepseek_checkpoint(), lease_ttl_s=10) as cluster:
        # vLLM's CPU kernel for MLA has blocks of 16 tokens, whatever is asked for (here 32).
        yield cluster.start()


def _check(model: Path, prompts: list[list[int]], answers: list[Answer]) -> None:
    """Each token is transformers' own choice after the tokens before it, with its probability."""
    asked = json.dumps([[p, a.tokens] for p, a in zip(prompts, answers, strict=True)])
    done = subprocess.run(
        [sys.executable, "-c", TRUTH, str(model)],
        input=asked, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    for answer, (best, chosen) in zip(answers, json.loads(done.stdout), strict=True):
        assert chosen == pytest.approx(best, abs=CLOSE)
        assert answer.logprobs == pytest.approx(chosen, abs=CLOSE)


@pytest.mark.engine
@pytest.mark.long
def test_answers_of_an_mla_model_are_right_locally_and_remotely(deepseek: Cluster) -> None:
    for record in [*deepseek.records("decode").values(), *deepseek.records("prefill").values()]:
        assert record.compat is not None
        assert record.compat.attention in ("CPU_MLA", "AMX_MLA")
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    deepseek.set_router(policy="always_local")
    local = [ask(deepseek, prompt, STEPS) for prompt in prompts]
    deepseek.set_router(policy="always_remote")
    remote = [ask(deepseek, prompt, STEPS) for prompt in prompts]
    assert [a.tokens for a in remote] == [a.tokens for a in local]
    told = [deepseek.explain(answer.request_id) for answer in remote]
    assert {t["path"] for t in told} == {"remote"}
    blocks = [-(-(length - 1) // 16) for length in LENGTHS]
    assert [t["kv_bytes"] for t in told] == [count * LATENT_BYTES for count in blocks]
    for here, there in zip(local, remote, strict=True):
        assert there.logprobs == pytest.approx(here.logprobs, abs=CLOSE)
    _check(deepseek.model_path, prompts, local)
    deepseek.assert_clean()
