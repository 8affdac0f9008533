"""Numbers from answers. Pure; all times in seconds.

A gap is the time between two moments at which something arrived for one request. Tokens that came
together are one arrival: their zero gaps are left out, because they would lower every percentile
of what a reader waits for, and spreading the wait over them would hide its length.

A gap counts in a window when it begins there, a request when it was sent there, a token when it
came there. So a stall at the end of a window is not lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.report import percentile
from benchmarks.serving.contract import Answer, Kind


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of something, in its own unit. count 0: all are nan."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good if its first token came within `ttft_s` (after it was due) and the 99th
    percentile of its own gaps is at most `itl_s`."""

    ttft_s: float
    itl_s: float

    def holds(self, answer: Answer) -> bool:
        if answer.error or not answer.token_s:
            return False
        waits = gaps([answer])
        within = ttft(answer) <= self.ttft_s
        return within and (not waits or percentile(waits, 0.99) <= self.itl_s)


def spread(values: Sequence[float]) -> Spread:
    if not values:
        nan = float("nan")
        return Spread(0, nan, nan)
    return Spread(len(values), percentile(values, 0.5), percentile(values, 0.99))


def good(answers: Iterable[Answer], kind: Kind | None = None) -> list[Answer]:
    """Those that are whole, of one kind or all."""
    return [a for a in answers if not a.error and kind in (None, a.ask.kind)]


def failed(answers: Iterable[Answer]) -> list[Answer]:
    return [a for a in answers if a.error]


def ttft(answer: Answer) -> float:
    """From when it should have been sent. Raises IndexError for an answer without tokens."""
    return answer.token_s[0] - answer.due_s


def ttfts(answers: Iterable[Answer], kind: Kind | None = None) -> list[float]:
    return [ttft(a) for a in good(answers, kind)]


def arrivals(answer: Answer) -> list[float]:
    """The moments at which tokens came, each once."""
    return sorted(set(answer.token_s))


def timed_gaps(
    answers: Iterable[Answer], seconds: float = float("inf")
) -> list[tuple[float, float]]:
    """(when it ended, how long) of each gap that began before `seconds`, of failed answers too:
    somebody waited for it. By the time it ended."""
    found = []
    for answer in answers:
        came = arrivals(answer)
        pairs = itertools.pairwise(came)
        found += [(later, later - earlier) for earlier, later in pairs if earlier < seconds]
    return sorted(found)


def gaps(answers: Iterable[Answer], seconds: float = float("inf")) -> list[float]:
    return [length for _, length in timed_gaps(answers, seconds)]


def stalled(waits: Sequence[float], limit_s: float) -> float:
    """Share of the waiting that was in gaps longer than the limit. A percentile of gaps forgets
    long ones where many short ones came meanwhile elsewhere; this does not. nan without gaps."""
    whole = sum(waits)
    return sum(w for w in waits if w > limit_s) / whole if whole else float("nan")


def tokens_per_s(answers: Iterable[Answer], seconds: float) -> float:
    """Output tokens of all kinds that came in the window."""
    return sum(t < seconds for a in answers for t in a.token_s) / seconds


def goodput(answers: Sequence[Answer], seconds: float, slo: Slo) -> tuple[float, float]:
    """(good requests per second, their share of all that were asked)."""
    kept = sum(slo.holds(a) for a in answers)
    return kept / seconds, kept / len(answers) if answers else float("nan")


def cached_share(turns: Sequence[Answer], cached: Sequence[int]) -> list[float]:
    """Of each turn after the first of one conversation: prompt tokens found in a cache, divided by
    all that was said before it. `cached`: beside each turn."""
    said, shares = 0, []
    for turn, hit in zip(turns, cached, strict=True):
        if said:
            shares.append(hit / said)
        said += len(turn.ask.prompt) + len(turn.tokens)
    return shares
