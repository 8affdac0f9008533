"""A model of the zoo, served by a cluster, beside one plain engine that tells the truth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, Worker
from tests.support.oracle import Oracle
from tests.support.prompts import Answer, truth
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
        expected = truth(self.oracle, prompts, steps, **sampling)
        if self.model.dtype != "float32":
            self._check_rounded(prompts, answers, expected, steps, **sampling)
            return
        self._check_equal(prompts, answers, expected)

    def check_alone(self, prompts: list[list[int]], answers: list[Answer]) -> None:
        """As `check`, for prompts that were asked one after the other.

        Their steps are known. For a model of 16 bits the plain engine computes in the same steps.
        It then rounds the same, so log probabilities are as equal as those of 32 bits."""
        if self.model.dtype == "float32":
            self.check(prompts, answers)
            return
        ends = [self._ends(*each) for each in zip(prompts, answers, strict=True)]
        self._check_equal(prompts, answers, truth(self.oracle, prompts, STEPS, ends=ends))

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

    def _check_equal(
        self,
        prompts: list[list[int]],
        answers: list[Answer],
        expected: list[tuple[list[int], list[float]]],
    ) -> None:
        for prompt, answer, (tokens, logprobs) in zip(prompts, answers, expected, strict=True):
            what = f"{self.name}: prompt of {len(prompt)} tokens"
            assert answer.tokens == tokens, what
            assert answer.logprobs == pytest.approx(logprobs, abs=TOLERANCE), what

    def _check_rounded(
        self,
        prompts: list[list[int]],
        answers: list[Answer],
        expected: list[tuple[list[int], list[float]]],
        steps: int,
        **sampling: Any,
    ) -> None:
        """Assert that each answer is that of the plain engine, with the last token apart or not.

        In 16 bits another expert may be chosen by one rounding, and all that follows differs."""
        apart = [[len(prompt) - 1, len(prompt)] for prompt in prompts]
        others, equal = truth(self.oracle, prompts, steps, ends=apart, **sampling), 0
        for prompt, answer, *both in zip(prompts, answers, expected, others, strict=True):
            what = f"{self.name}: prompt of {len(prompt)} tokens: {answer}, not {both}"
            assert any(
                answer.logprobs[: (same := _alike(answer.tokens, tokens))]
                == pytest.approx(logprobs[:same], abs=ROUNDED)
                for tokens, logprobs in both
            ), what
            equal += any(answer.tokens == tokens for tokens, _ in both)
        assert equal > len(prompts) // 2, "rounding changes few answers"

    def check_paths(self, answers: list[Answer], *, flags: bool = False) -> None:
        """All were prefilled remotely, unless the zoo says that the model stays local, and why.

        flags: whether a worker has two ranks or speculates."""
        told = [self.cluster.explain(answer.request_id) for answer in answers]
        local = self.model.local or (self.model.local_with_flags if flags else "")
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
    # Ranks that compute a long prompt leave their main process no time for the usual 2 s.
    cluster = Cluster(directory, path, kv_mib=192, lease_ttl_s=10)
    plain = {"block_size": model.block_size, "dtype": model.dtype, **model.plain}
    with Oracle(path, **plain) as oracle:
        try:
            served = Served(name, model, cluster, oracle, common, plain)
            cluster.start_servers()
            for role in ("decode", "prefill"):
                served.launch(role)
            development = {"VLLM_SERVER_DEV_MODE": "1"}  # to empty a prefix cache
            cluster.launch("frontend", *common, *model.front, *front, env=development)
            cluster.wait_ready(*cluster.workers)
            cluster.set_router(policy="always_remote")
            yield served
            assert not cluster.log_errors()
        finally:
            cluster.stop()
