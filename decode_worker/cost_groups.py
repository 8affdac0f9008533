"""The prompts that are being computed, on this worker and on prefill workers, with their sums.

A decision reads the sums. So it does not visit each prompt. Adding and subtracting spans makes no
rounding error, because a span is a multiple of 2**-19. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pullfill.decode_worker.cost_choice import Streams
from pullfill.decode_worker.cost_rates import LocalRates, Queue, span
from pullfill.decode_worker.cost_requests import Placed
from pullfill.decode_worker.rules import Situation


class Here:
    """Prompts that are computed on this worker now.

    tokens: number of prompt tokens that are still to be computed, over all these prompts."""

    def __init__(self) -> None:
        self._requests: dict[str, Placed] = {}
        self._x1 = self._x2 = 0.0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Placed]:
        return iter(self._requests.values())

    def add(self, name: str, request: Placed) -> None:
        self._requests[name] = request
        self._count(request, 1)

    def pop(self, name: str) -> None:
        """Take a prompt out, if it is here."""
        if (request := self._requests.pop(name, None)) is not None:
            self._count(request, -1)

    def among(self, tokens: Mapping[str, int]) -> list[tuple[str, Placed, int]]:
        """Return the prompts that `tokens` gives tokens to: name, prompt, number of tokens."""
        if len(self._requests) <= len(tokens):
            found = ((name, one, tokens.get(name, 0)) for name, one in self._requests.items())
            return [each for each in found if each[2]]
        known = self._requests
        return [(name, known[name], now) for name, now in tokens.items() if now and name in known]

    def computed(self, request: Placed, tokens: int) -> None:
        """Note that the next step computes so many tokens of a prompt that is here."""
        self._count(request, -1)
        request.at += tokens
        request.left = max(0, request.left - tokens)
        self._count(request, 1)

    def seconds(self, rates: LocalRates) -> float:
        """Return how many seconds the computation of these prompts takes."""
        return rates.work((self._x1, self._x2))

    def _count(self, request: Placed, sign: int) -> None:
        x1, x2 = span(request.at, request.left)
        self._x1 += sign * x1
        self._x2 += sign * x2
        self.tokens += sign * request.left


class Away:
    """Prompts that were sent to prefill workers and whose KV has not come yet, oldest first.

    The oldest are assumed to be computed now, one by each prefill worker. When one of these ends,
    the next prompt is assumed to begin."""

    def __init__(self) -> None:
        self._requests: dict[str, Placed] = {}
        self._begun: dict[str, Placed] = {}
        self._x1 = self._x2 = 0.0
        self._tokens = 0
        self._itl: dict[float, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, name: str) -> Placed | None:
        return self._requests.get(name)

    def add(self, name: str, request: Placed, clock: float) -> None:
        """Add a prompt that was sent away now."""
        self._requests[name] = request
        self._count(request, 1)
        if len(self._requests) <= request.queue.workers:
            request.began, self._begun[name] = clock, request

    def pop(self, name: str, clock: float) -> Placed | None:
        """Take a prompt out, if it is away. If it had begun, the next one that waits begins."""
        if (request := self._requests.pop(name, None)) is None:
            return None
        self._count(request, -1)
        if self._begun.pop(name, None) is not None:
            waiting = (one for one in self._requests.items() if not one[1].began)
            if (following := next(waiting, None)) is not None:
                following[1].began, self._begun[following[0]] = clock, following[1]
        return request

    def queue(self, now: Situation, clock: float) -> Queue:
        """Return the work in front of a new job. Of begun jobs only the predicted rest counts."""
        x1, x2 = self._x1, self._x2
        for request in self._begun.values():
            took = max(request.compute_s, 1e-6)
            done = 1.0 - min(1.0, max(0.1, (request.began + request.compute_s - clock) / took))
            own = span(request.start, request.tokens)
            x1, x2 = x1 - done * own[0], x2 - done * own[1]
        # Nobody says how long the prompts of other decode workers are. They are taken to be like
        # ours, or to be as long as this one.
        others = max(0, now.ahead_tokens - self._tokens) / 256.0
        mine = span(now.hit_tokens, now.remote_tokens)
        each = self._x2 / self._x1 if self._x1 else mine[1] / mine[0] if mine[0] else 0.0
        jobs = max(now.ahead_jobs, len(self._requests))
        return Queue(now.pullers, max(1, now.pool), jobs, (x1 + others, x2 + others * each))

    def streams(self, running: Mapping[float, int]) -> Streams:
        """Return the running streams, and those that begin when these prompts are back.

        running: number of streams by their target for the time between tokens."""
        found = dict(running)
        for target, count in self._itl.items():
            found[target] = found.get(target, 0) + count
        return Streams(tuple(found.items()))

    def _count(self, request: Placed, sign: int) -> None:
        x1, x2 = span(request.start, request.tokens)
        self._x1 += sign * x1
        self._x2 += sign * x2
        self._tokens += sign * request.tokens
        change(self._itl, request.targets.itl_s, sign)


def change(counts: dict[float, int], key: float, by: int) -> None:
    """Add to one of several counts. One that becomes 0 is left out."""
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]
