"""Steady load on a cluster while something happens to it, checked against the oracle at the end."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import Answer, ask, assert_right, random_prompt
from tests.support.waiting import until


class Load:
    """`threads` clients, each sending prompts one after the other until the block is left.

    Every answer is kept with its prompt, every failure with its message.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        threads: int = 3,
        lengths: tuple[int, ...] = (40, 300, 900, 1400),
        max_tokens: int = 6,
        seed: int = 100,
    ) -> None:
        self._cluster = cluster
        self._lengths = lengths
        self._max_tokens = max_tokens
        self._seed = seed
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(threads)
        ]
        self.done: list[tuple[list[int], Answer]] = []
        self.failures: list[str] = []
        self.slowest_s = 0.0
        self._explained: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._client = self._cluster.client()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        assert kind or not any(t.is_alive() for t in self._threads), "a request never ended"

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            length = self._lengths[(turn + number) % len(self._lengths)]
            prompt = random_prompt(length, seed=self._seed + 1000 * number + turn)
            turn += 1
            began = time.monotonic()
            try:
                answer = ask(self._cluster, prompt, self._max_tokens, self._client)
            except Exception as exc:
                self.failures.append(f"{length} tokens: {exc!r}")
            else:
                self.done.append((prompt, answer))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def more(self, count: int, within_s: float = 60.0) -> int:
        """Wait for `count` more answers. Returns how many there were before."""
        before = len(self.done)
        until(lambda: len(self.done) >= before + count, within_s, f"{count} more answers")
        return before

    def check(self, oracle: Oracle, *, at_least: int = 5) -> None:
        """No failure, and every token the oracle's."""
        assert not self.failures, self.failures[:5]
        assert len(self.done) >= at_least, "too little load to say anything"
        prompts, answers = zip(*self.done, strict=True)
        assert_right(oracle, prompts, answers, self._max_tokens)

    def seen(self, field: str) -> set[str]:
        """The values of a field of `told`: `path`, `decode_instance`, …"""
        return {told[field] for told in self.told()}

    def told(self) -> list[dict[str, Any]]:
        """How each request was served; asked once per request."""
        for _, answer in list(self.done)[len(self._explained) :]:
            self._explained.append(self._cluster.explain(answer.request_id))
        return self._explained
