"""Each architecture of the zoo: a cluster answers as one plain engine does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pullfill.engine.kv import NO_ATTENTION
from tests.integration.test_joining import last_error
from tests.support.cluster import STOCK, Cluster, Worker
from tests.support.drafts import FEW, NGRAM, SPECULATE
from tests.support.lora import lora_adapter
from tests.support.oracle import Oracle
from tests.support.prompts import (
    Answer,
    ask,
    ask_all,
    assert_right,
    forget_decode_prefixes,
    going_away,
    random_prompt,
    truth,
)
from tests.support.zoo import ZOO, Model

STEPS = 6
"""Tokens of an answer."""
TOLERANCE = 1e-4
"""Of log probabilities."""
CHUNK = 512
"""Tokens of a step, of `Cluster.launch`."""
ROUNDED = 0.1
"""The same, of a model that computes in 16 bits."""


@dataclass
class Served:
    """name, model: of the zoo.

    flags: of all processes.
    plain: arguments of the plain engine."""

    name: str
    model: Model
    cluster: Cluster
    oracle: Oracle
    flags: Sequence[str]
    plain: dict[str, Any]

    def launch(self, role: str, *more: str) -> Worker:
        """Start a worker with the zoo's flags and these. Does not wait."""
        own = self.model.decode if role == "decode" else ()
        return self.cluster.launch(role, *self.flags, *own, *more)

    def renew(self, roles: Sequence[str], *more: str) -> None:
        """Replace the workers of these roles by one of each with these flags more.

        The old ones go first: these flags may change vLLM's blocks and so the compatibility of the
        workers, and two kinds of workers are not in one namespace."""
        for worker in [worker for role in roles for worker in self.cluster.of(role)]:
            assert worker.stop() == 0
        self.cluster.wait_ready(*[self.launch(role, *more) for role in roles])

    def check(
        self, prompts: list[list[int]], answers: list[Answer], steps: int = STEPS, **sampling: Any
    ) -> None:
        """Assert that the plain engine answers the same.

        steps, sampling: what the cluster was asked with, as for `ask`."""
        if self.model.dtype == "float32":
            assert_right(self.oracle, prompts, answers, steps, TOLERANCE, **sampling)
        else:
            self._check_rounded(prompts, answers, steps, **sampling)

    def check_alone(self, prompts: list[list[int]], answers: list[Answer]) -> None:
        """As `check`, for prompts that were asked one after the other.

        Their steps are known. For a model of 16 bits the plain engine computes in the same steps.
        It then rounds the same, so log probabilities are as equal as those of 32 bits."""
        if self.model.dtype == "float32":
            self.check(prompts, answers)
            return
        ends = [self._ends(*each) for each in zip(prompts, answers, strict=True)]
        assert_right(self.oracle, prompts, answers, STEPS, TOLERANCE, ends=ends)

    def _ends(self, prompt: list[int], answer: Answer) -> list[int]:
        """Numbers of tokens after which a step of the prompt ended, if it was alone."""
        told = self.cluster.explain(answer.request_id)
        remote = told["path"] == "remote" and not told["fallback"]
        if not remote or len(prompt) == 1:
            return self._chunks(len(prompt))
        # The decode worker computes the last token.
        return [*self._chunks(len(prompt) - 1), len(prompt)]

    def _chunks(self, length: int) -> list[int]:
        """The same, of so many tokens that one worker computes from the first on."""
        (unit,) = {r.compat.block_size for r in self.cluster.records("decode").values() if r.compat}
        if not self.model.caches:
            unit = 1
        # With a prefix cache, vLLM ends steps at blocks, also at the last whole one of a prompt:
        # there it keeps states.
        last, ends = length - length % unit, [0]
        while ends[-1] < length:
            end = min(ends[-1] + CHUNK, length)
            if end < last:
                end -= end % unit
            elif ends[-1] < last:
                end = last
            ends.append(end)
        return ends[1:]

    def _check_rounded(
        self, prompts: list[list[int]], answers: list[Answer], steps: int, **sampling: Any
    ) -> None:
        """Assert that each answer is that of the plain engine, with the last token apart or not.

        In 16 bits another expert may be chosen by one rounding, and all that follows differs."""
        apart = [[len(prompt) - 1, len(prompt)] for prompt in prompts]
        whole, equal = truth(self.oracle, prompts, steps, **sampling), 0
        others = truth(self.oracle, prompts, steps, ends=apart, **sampling)
        for prompt, answer, *both in zip(prompts, answers, whole, others, strict=True):
            what = f"{self.name}: prompt of {len(prompt)} tokens: {answer}, not {both}"
            assert any(
                answer.logprobs[: (same := _alike(answer.tokens, tokens))]
                == pytest.approx(logprobs[:same], abs=ROUNDED)
                for tokens, logprobs in both
            ), what
            equal += any(answer.tokens == tokens for tokens, _ in both)
        assert equal > len(prompts) // 2, "rounding changes few answers"

    def check_paths(self, answers: list[Answer], *, flags: bool = False) -> None:
        """All were prefilled remotely, unless the zoo says that flags keep them local, and why.

        flags: whether a worker has two ranks or speculates."""
        told = [self.cluster.explain(answer.request_id) for answer in answers]
        local = self.model.local_with_flags if flags else ""
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


def _alike(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens of two answers have the same tokens before them.

    Rounding may change a token whose log probability is close to another's, and all after it."""
    pairs = zip(tokens, others, strict=True)
    return next((at + 1 for at, (a, b) in enumerate(pairs) if a != b), len(tokens))


@contextmanager
def serving(
    name: str, directory: Path, flags: Sequence[str] = (), front: Sequence[str] = ()
) -> Iterator[Served]:
    """Serve a model of the zoo by one worker of each kind that prefills every prompt remotely.

    flags: of all processes. front: of the frontend. Both are added to the zoo's. At the end no
    process may have logged an error."""
    model = ZOO[name]
    path = model.checkpoint()
    common = (f"--block-size={model.block_size}", f"--dtype={model.dtype}", *model.flags, *flags)
    if STOCK and model is ZOO["DeepSeek-V3"]:  # our own workers do it: engine/args.py
        ops = json.dumps(model.plain["compilation_config"])
        common += (f"--compilation-config={ops}", "--max-num-batched-tokens=4096")
    # Ranks that compute a long prompt leave their main process no time for the usual 2 s.
    plain = {"block_size": model.block_size, "dtype": model.dtype, **model.plain}
    with (
        Oracle(path, **plain) as oracle,
        Cluster(directory, path, kv_mib=192, lease_ttl_s=10) as cluster,
    ):
        workers = ("decode", *common, *model.decode), ("prefill", *common)
        frontend = ("frontend", *common, *model.front, *front)
        cluster.start(*workers, frontend, policy="always_remote")
        yield Served(name, model, cluster, oracle, common, plain)
        assert not cluster.log_errors()


pytestmark = pytest.mark.engine

SHORT_PROMPTS = (2, 33, 90, 200)
LENGTHS = (*SHORT_PROMPTS, 700, 1500)
ADAPTER = "adapter"
KV_WORKERS = ("decode", "prefill")
SHORT = ("Gemma 3",)
"""The others are asked by `make zoo`."""
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
        assert len(record.compat.kv_groups.split()) == served.model.groups
        assert record.compat.attention != NO_ATTENTION, "vLLM's layers say it"
    cold = [random_prompt(length, seed=1) for length in SHORT_PROMPTS]
    answers = [ask(cluster, prompt, STEPS) for prompt in cold]
    served.check_alone(cold, answers)
    served.check_paths(answers)
    served.check_bytes(cold, answers)
    assert len({tuple(answer.tokens) for answer in answers}) > len(cold) // 2, "prompts matter"


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
    assert cluster.of("prefill") == []
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
