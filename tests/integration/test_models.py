"""Each architecture of the zoo: a cluster answers as one plain engine does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import (
    Answer,
    ask,
    ask_all,
    forget_decode_prefixes,
    going_away,
    random_prompt,
    truth,
)
from tests.support.zoo import ZOO, Model

pytestmark = pytest.mark.engine

LENGTHS = (2, 33, 90, 200, 700, 1500)
STEPS = 6
TOLERANCE = 1e-4
ROUNDED = 0.1
SHORT = ("Gemma 3", "Mistral")
"""The others are asked by `make zoo`."""


@dataclass
class Served:
    name: str
    model: Model
    cluster: Cluster
    oracle: Oracle

    def check(self, prompts: list[list[int]], answers: list[Answer]) -> None:
        expected = truth(self.oracle, prompts, STEPS)
        for prompt, answer, (tokens, logprobs) in zip(prompts, answers, expected, strict=True):
            what = f"{self.name}: prompt of {len(prompt)} tokens"
            if self.model.dtype != "float32":  # rounding may change a token, and all after it
                assert answer.logprobs[0] == pytest.approx(logprobs[0], abs=ROUNDED), what
                continue
            assert answer.tokens == tokens, what
            assert answer.logprobs == pytest.approx(logprobs, abs=TOLERANCE), what

    def check_paths(self, answers: list[Answer]) -> None:
        """All were prefilled remotely, unless the zoo says that the model stays local, and why."""
        told = [self.cluster.explain(answer.request_id) for answer in answers]
        local = self.model.local
        expected = ("local", local) if local else ("remote", "policy_always_remote")
        assert {(t["path"], t["reason"]) for t in told} == {expected}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in ZOO],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = ZOO[request.param]
    path = model.checkpoint()
    flags = (f"--block-size={model.block_size}", f"--dtype={model.dtype}")
    # Ranks that compute a long prompt leave their main process no time for the usual 2 s.
    cluster = Cluster(tmp_path_factory.mktemp("zoo"), path, kv_mib=192, lease_ttl_s=10)
    plain = {"block_size": model.block_size, "dtype": model.dtype, **model.plain}
    with Oracle(path, **plain) as oracle:
        try:
            cluster.start_servers()
            cluster.launch("decode", *flags, *model.flags, *model.decode)
            cluster.launch("prefill", *flags, *model.flags)
            development = {"VLLM_SERVER_DEV_MODE": "1"}  # to empty a prefix cache
            cluster.launch("frontend", *flags, *model.front, env=development)
            cluster.wait_ready(*cluster.workers)
            cluster.set_router(policy="always_remote")
            yield Served(request.param, model, cluster, oracle)
            assert not cluster.log_errors()
        finally:
            cluster.stop()


def test_answers_are_those_of_one_engine(served: Served) -> None:
    cluster = served.cluster
    for record in [*cluster.records("decode").values(), *cluster.records("prefill").values()]:
        assert record.compat is not None
        assert len(record.compat.kv_groups.split()) == served.model.groups
    cold = [random_prompt(length, seed=1) for length in LENGTHS]
    answers = [ask(cluster, prompt, STEPS) for prompt in cold]
    served.check(cold, answers)
    served.check_paths(answers)
    assert len({tuple(answer.tokens) for answer in answers}) > len(cold) // 2, "prompts matter"

    longer = [prompt + random_prompt(130, seed=2) for prompt in cold]
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

    with going_away(cluster, random_prompt(1800, seed=6)):
        pass
    cluster.assert_clean()

    cluster.of("prefill")[0].arm("prefill.before_commit=kill@1")
    last = [tails[-1] + random_prompt(200, seed=7), random_prompt(1100, seed=7)]
    served.check(last, ask_all(cluster, last, STEPS))  # recomputed by the decode worker
    assert cluster.of("prefill") == [] or served.model.local
    cluster.assert_clean()
