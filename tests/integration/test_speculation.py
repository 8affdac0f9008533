"""Speculative decoding: answers and accepted drafts are those of one engine that speculates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pullfill.engine import speculation
from tests.support.answers import Heard, ask_for
from tests.support.cluster import BLOCK, Cluster, until
from tests.support.drafts import FEW, NGRAM, SPECULATE
from tests.support.oracle import Oracle
from tests.support.prompts import assert_right, forget_decode_prefixes, random_prompt

pytestmark = pytest.mark.engine

LENGTHS = (3, 33, 34, 65, 66, 300, 1500)
STEPS = 30
TOLERANCE = 1e-4
ALLOWED = list(FEW)
"""Answers of so few tokens repeat themselves, so some drafts are accepted."""
DRAFTS = "vllm:spec_decode_num_"
COUNTERS = [f"{DRAFTS}{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Iterator[Oracle]:
    with Oracle(
        model_path, speculative_config=NGRAM, disable_log_stats=False, block_size=BLOCK
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Only the decode worker speculates. The frontend knows it, for its metrics."""
    processes = (("decode", SPECULATE), "prefill", ("frontend", SPECULATE))
    with Cluster(tmp_path_factory.mktemp("ngram"), model_path, lease_ttl_s=10) as cluster:
        yield cluster.start(*processes, policy="always_remote")
        # vLLM's frontend logs a traceback of each logit_bias that it refuses.
        assert not [line for line in cluster.log_errors() if "serving.py" not in line]


def ask(cluster: Cluster, prompt: list[int], steps: int = STEPS) -> Heard:
    return ask_for(cluster, prompt, steps, logprobs=1, allowed_token_ids=ALLOWED)


def check(oracle: Oracle, prompt: list[int], heard: Heard, steps: int = STEPS) -> None:
    assert heard.done.wait(60)
    assert not heard.error
    assert_right(oracle, [prompt], [heard], steps, TOLERANCE, allowed_token_ids=ALLOWED)


def drafts_of(cluster: Cluster) -> dict[str, float]:
    """What was counted, once it stays the same."""
    last: dict[str, float] = {}
    while (now := {name: cluster.counter(f"{name}_total") for name in COUNTERS}) != last:
        last = now
        time.sleep(0.5)
    return last


@pytest.mark.essential
def test_answers_and_accepted_drafts_are_those_of_one_engine(
    cluster: Cluster, oracle: Oracle
) -> None:
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    before = drafts_of(cluster)
    for prompt in prompts:
        heard = ask(cluster, prompt)
        check(oracle, prompt, heard)
        told = cluster.explain(heard.request_id)
        assert (told["path"], told["remote_tokens"]) == ("remote", len(prompt) - 2)
    # As many were made and accepted as by the engine. On a busy machine, a worker's statistics come
    # seconds after the answer.
    right = oracle.counters(DRAFTS)
    goal = {name: before[name] + right[name] for name in COUNTERS}
    until(lambda: drafts_of(cluster) == goal, 30, f"all statistics have come: {goal}")
    assert right[f"{DRAFTS}accepted_tokens"] > 0

    longer = [prompt + random_prompt(70, seed=2) for prompt in prompts]
    for prompt, heard in [(p, ask(cluster, p)) for p in longer]:  # at once, and with a hit
        check(oracle, prompt, heard)
    forget_decode_prefixes(cluster)
    longest = [prompt + random_prompt(31, seed=3) for prompt in longer]
    for prompt, heard in [(p, ask(cluster, p)) for p in longest]:
        check(oracle, prompt, heard)
        assert cluster.explain(heard.request_id)["path"] == "remote"
    cluster.assert_clean()


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
def test_the_first_draft_compiles_nothing() -> None:
    """vLLM's own drafter, in this process."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer, batch_propose_numba

    limits = {
        "model_config": {"max_model_len": 64}, "scheduler_config": {"max_num_seqs": 2},
        "parallel_config": {"tensor_parallel_size": 1},
    }  # fmt: skip
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(**NGRAM),
        **{name: SimpleNamespace(**fields) for name, fields in limits.items()},
    )
    tokens = np.zeros((2, 64), dtype=np.int32)
    batch = SimpleNamespace(num_tokens_no_spec=np.zeros(2, dtype=np.int32), token_ids_cpu=tokens)
    drafter = NgramProposer(config)
    worker = SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter, input_batch=batch))
    core = SimpleNamespace(
        vllm_config=config, collective_rpc=lambda method, args: [method(worker, *args)]
    )
    speculation.compile_drafter(core)
    before = list(batch_propose_numba.signatures)
    tokens[1, :6] = (5, 6, 7, 8, 5, 6)
    batch.num_tokens_no_spec[1] = 6
    assert drafter.propose(3, [[], [6]], batch.num_tokens_no_spec, tokens) == [[], [7, 8, 5]]
    assert batch_propose_numba.signatures == before


@pytest.mark.essential
def test_what_vllm_would_answer_wrong_is_refused(cluster: Cluster) -> None:
    # vLLM drops min_p from greedy requests. With a temperature, that is refused before it.
    for refused in ({"temperature": 0.5}, {"logit_bias": {"40": 5}}):
        heard = ask_for(cluster, random_prompt(33, seed=4), STEPS, **refused)
        assert heard.done.wait(60)
        assert heard.status == 400, refused
        assert "speculative decoding" in heard.error
