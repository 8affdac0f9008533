"""The published tables, and the same figures from answers that were measured or simulated. Pure.

The published tables are those of vLLM's P2P NCCL connector: one prefill server and n decode servers
on 1 + n A800 GPUs, beside one plain vLLM server on one GPU. The tables compare per GPU. An engine
counts as a device here, so both sides of a comparison have the same number of devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Row, percentile, row, versus
from benchmarks.serving import stats
from benchmarks.serving.contract import Answer

SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
TIMES = ("TTFT", "TPOT", "ITL", "E2E")


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of every prompt and of every answer, in tokens."""

    name: str
    prompt: int
    answer: int


SHAPES = (Shape("1K/1K", 1024, 1024), Shape("1K/200", 1024, 200))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table: a shape, and the number of decode engines beside one prefill engine.

    source: `measured`, or `simulated` with the policy of the router."""

    shape: Shape
    decode: int
    source: str = "measured"

    @property
    def devices(self) -> int:
        return 1 + self.decode

    @property
    def name(self) -> str:
        return f"{self.shape.name}, 1P{self.decode}D, {self.source}"

    @property
    def peer(self) -> str:
        return f"{self.devices} plain vLLM servers"


Published = Mapping[str, float]
"""Changes against one plain vLLM server per GPU, in percent, by the name of the figure."""

RATE, ITL_P99, TTFT_P99, TPOT_P50 = "tokens/s per device", "ITL p99", "TTFT p99", "TPOT p50"
COMPARED = (RATE, ITL_P99, TTFT_P99, TPOT_P50)
PUBLISHED: dict[tuple[str, int], Published] = {
    ("1K/1K", 5): {RATE: 7.2, ITL_P99: -81.3, TTFT_P99: 26.8, TPOT_P50: 0.0},
    ("1K/1K", 6): {RATE: 9.6, ITL_P99: -81.0, TTFT_P99: 210.0, TPOT_P50: 0.0},
    ("1K/200", 1): {RATE: 37.4, ITL_P99: -81.8, TTFT_P99: 41.8, TPOT_P50: 0.0},
}
"""By shape and number of decode servers. TPOT is given as "no change"."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One side of a row.

    rate: output tokens per second and device.
    times: percentiles in seconds, by names as `TTFT p99`.
    requests: how many answers the percentiles come from."""

    rate: float
    times: Mapping[str, float]
    requests: int

    def of(self, name: str) -> float:
        """The figure with this name: RATE, in tokens/s, or a time, in seconds."""
        return self.rate if name == RATE else self.times[name]


def rate_of(answers: Sequence[Answer], seconds: float, devices: int, since: float = 0.0) -> float:
    """Output tokens that came from `since` to `seconds`, per second and device."""
    before = stats.tokens_per_s(answers, since) * since if since else 0.0
    came = stats.tokens_per_s(answers, seconds) * seconds - before
    return came / (seconds - since) / devices


def figures_of(answers: Sequence[Answer], seconds: float, devices: int) -> Figures:
    """The figures of one window.

    TTFT and E2E begin when a request was due. TPOT is the mean time between the tokens of one
    answer, and ITL each single time. Answers that failed count for the rate only.
    Raises ValueError without a whole answer.

    seconds: the window, in which requests were sent."""
    whole = stats.good(answers)
    found: dict[str, Sequence[float]] = {
        "TTFT": [stats.ttft(a) for a in whole],
        "TPOT": [(a.token_s[-1] - a.token_s[0]) / max(1, len(a.token_s) - 1) for a in whole],
        "ITL": stats.gaps(whole),
        "E2E": [a.token_s[-1] - a.due_s for a in whole],
    }
    times = {
        f"{name} {label}": percentile(values, share)
        for name, values in found.items()
        for label, share in SHARES.items()
    }
    return Figures(rate_of(answers, seconds, devices), times, len(whole))


def median_of(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds. Requests are added."""
    times = {name: statistics.median(f.times[name] for f in rounds) for name in rounds[0].times}
    rate = statistics.median(f.rate for f in rounds)
    return Figures(rate, times, sum(f.requests for f in rounds))


def change(ours: float, plain: float) -> float:
    """How much more ours is, in percent of `plain`."""
    return 100.0 * (ours / plain - 1.0)


@dataclass(frozen=True, slots=True)
class Pair:
    """A case with the figures of pullfill and of as many plain servers.

    asked: requests per second that each side was asked.
    full: tokens per second and device with always the same number of requests under way, of
    pullfill and of the plain servers. None: it was not measured."""

    case: Case
    ours: Figures
    plain: Figures
    asked: tuple[float, float]
    full: tuple[float, float] | None = None

    def figure(self, name: str) -> tuple[float, float]:
        """Ours and that of the plain servers, to be compared with the published tables."""
        if name == RATE and self.full is not None:
            return self.full
        return self.ours.of(name), self.plain.of(name)


def rows_of(pair: Pair) -> list[Row]:
    """All figures of a case, and its changes beside the published ones."""
    case, name, peer = pair.case, pair.case.name, pair.case.peer
    rows = [versus(f"{name}: requests asked", pair.asked[0], "1/s", peer, pair.asked[1])]
    if pair.full is not None:
        rows.append(versus(f"{name}, saturated: {RATE}", pair.full[0], "1/s", peer, pair.full[1]))
    rows.append(versus(f"{name}: {RATE}", pair.ours.rate, "1/s", peer, pair.plain.rate))
    for time in pair.ours.times:
        ours, plain = pair.ours.times[time], pair.plain.times[time]
        rows.append(versus(f"{name}: {time}", 1e3 * ours, "ms", peer, 1e3 * plain))
    published = PUBLISHED.get((case.shape.name, case.decode), {})
    for figure in COMPARED:
        made = row(f"{name}: {figure}, change", change(*pair.figure(figure)), "%")
        if figure in published:
            made.peer, made.peer_value = "published, A800 GPUs", published[figure]
        rows.append(made)
    return rows


def table(pairs: Sequence[Pair]) -> str:
    """Markdown: the figures that were published, beside ours."""
    lines = [
        "| lengths | engines | figure | pullfill | plain servers | change | published change |",
        "|---" * 7 + "|",
    ]
    for pair in pairs:
        case = pair.case
        published = PUBLISHED.get((case.shape.name, case.decode), {})
        for figure in COMPARED:
            ours, plain = pair.figure(figure)
            scale, unit = (1.0, "/s") if figure == RATE else (1e3, " ms")
            said = f"{published[figure]:+.0f} %" if figure in published else "–"
            lines.append(
                f"| {case.shape.name} | 1P{case.decode}D, {case.source} | {figure} "
                f"| {scale * ours:.4g}{unit} | {scale * plain:.4g}{unit} "
                f"| {change(ours, plain):+.0f} % | {said} |"
            )
    return "\n".join(lines)
