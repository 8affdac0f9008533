"""Each architecture of the zoo: a cluster answers as one plain engine does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.cluster import Cluster
from tests.support.lora import lora_adapter
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

SHORT_PROMPTS = (2, 33, 90, 200)
LENGTHS = (*SHORT_PROMPTS, 700, 1500)
STEPS = 6
TOLERANCE = 1e-4
ROUNDED = 0.1
ADAPTER = "adapter"
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

    def check_bytes(self, prompts: list[list[int]], answers: list[Answer]) -> None:
        """Of a latent cache each decode rank got one copy, whatever the number of heads."""
        if not self.model.block_bytes:
            return
        for prompt, answer in zip(prompts, answers, strict=True):
            blocks = -(-(len(prompt) - 1) // self.model.block_size)
            sent = self.cluster.explain(answer.request_id)["kv_bytes"]
            assert sent == blocks * self.model.block_bytes


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in ZOO],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = ZOO[request.param]
    path = model.checkpoint()
    flags = (f"--block-size={model.block_size}", f"--dtype={model.dtype}", *model.flags)
    front = model.front
    if not model.lora:
        adapter = lora_adapter(tmp_path_factory.mktemp("adapter") / ADAPTER, path, seed=0)
        flags += ("--enable-lora", "--max-loras=2")
        front += ("--lora-modules", f"{ADAPTER}={adapter}")
    # Ranks that compute a long prompt leave their main process no time for the usual 2 s.
    cluster = Cluster(tmp_path_factory.mktemp("zoo"), path, kv_mib=192, lease_ttl_s=10)
    plain = {"block_size": model.block_size, "dtype": model.dtype, **model.plain}
    with Oracle(path, **plain) as oracle:
        try:
            cluster.start_servers()
            cluster.launch("decode", *flags, *model.decode)
            cluster.launch("prefill", *flags)
            development = {"VLLM_SERVER_DEV_MODE": "1"}  # to empty a prefix cache
            cluster.launch("frontend", *flags, *front, env=development)
            cluster.wait_ready(*cluster.workers)
            cluster.set_router(policy="always_remote")
            yield Served(request.param, model, cluster, oracle)
            assert not cluster.log_errors()
        finally:
            cluster.stop()


def test_cold(served: Served) -> None:
    cluster = served.cluster
    for record in [*cluster.records("decode").values(), *cluster.records("prefill").values()]:
        assert record.compat is not None
        assert len(record.compat.kv_groups.split()) == served.model.groups
    cold = [random_prompt(length, seed=1) for length in SHORT_PROMPTS]
    answers = [ask(cluster, prompt, STEPS) for prompt in cold]
    served.check(cold, answers)
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
    ask(cluster, prompts[0][:5], model=ADAPTER)  # loads it, and takes the digest of its files
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


def test_killed(served: Served) -> None:
    """The last test of a model: the decode worker computes what its prefill worker did not."""
    cluster = served.cluster
    cluster.of("prefill")[0].arm("prefill.before_commit=kill@1")
    prompts = [random_prompt(length, seed=7) for length in (700, 1100)]
    served.check(prompts, ask_all(cluster, prompts, STEPS))
    assert cluster.of("prefill") == [] or served.model.local
    cluster.assert_clean()
