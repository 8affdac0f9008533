"""What is held against what: the targets of the serving benchmark, as rows.

Every value is the median over the windows of its kind of a number of each window. A row that rests
on a window in which others used the machine says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from benchmarks.report import Row, median, missing, row, versus
from benchmarks.serving import stats
from benchmarks.serving.campaign import Measured, failures
from benchmarks.serving.contract import Answer, Kind, Name
from benchmarks.serving.parts import ALONE, CONTROL, LONGS
from benchmarks.serving.window import Window

BUSY = " [machine not quiet]"
STALL_S = 0.05


def itl_p99(window: Window) -> float:
    return 1e3 * stats.spread(window.gaps()).p99


def itl_p50(window: Window) -> float:
    return 1e3 * stats.spread(window.gaps()).p50


def stalled(window: Window) -> float:
    """% of the streams' time; a p99 forgets stalls that are rarer than one gap in a hundred."""
    return 100 * stats.stalled(window.gaps(), STALL_S)


def tokens(window: Window) -> float:
    return stats.tokens_per_s(window.answers, window.length_s)


def long_ttft(window: Window) -> float:
    return 1e3 * stats.spread(stats.ttfts(window.answers, Kind.LONG)).p50


def cost(window: Window) -> float:
    return window.cpu_ms_per_request


class Verdict:
    """Makes rows of what was measured; `rows` is the whole of it."""

    def __init__(self, measured: Measured) -> None:
        self._m = measured
        self._aggregated = [s.name for s in measured.systems if s.aggregated]

    def rows(self) -> list[Row]:
        """Targets first; then what failed or was too noisy."""
        return [
            *self._interference(),
            *self._beside_nixl(),
            *self._chat(),
            *self._troubles(),
        ]

    def _interference(self) -> list[Row]:
        if not self._m.of(Name.PULLFILL, "interference", LONGS):
            return []
        ours, at = Name.PULLFILL, ("interference", LONGS)
        with_longs, control = (ours, *at), (ours, "interference", CONTROL)
        name = "(a) ITL p99 with longs"
        rows = [self._against(name, "ms", itl_p99, with_longs, control, "own control", at_most=1.5)]
        rows += [
            lower(self._against(name, "ms", itl_p99, with_longs, (peer, *at), peer))
            for peer in self._aggregated
        ]
        name = f"(a) time in gaps > {1e3 * STALL_S:g} ms with longs"
        rows += [
            lower(self._against(name, "%", stalled, with_longs, (peer, *at), peer))
            for peer in self._aggregated
        ]
        best = max(
            (peer for peer in self._aggregated if self._m.of(peer, *at)),
            key=lambda peer: self._m.over(peer, *at, tokens) or 0.0,
            default="aggregated systems",
        )
        rows.append(
            self._against(
                "(a) tokens/s with longs",
                "1/s",
                tokens,
                with_longs,
                (best, *at),
                f"{best}, the best aggregated",
                at_least=1.0,
            )
        )
        alone = (Name.ONE_CORE, "interference", ALONE)
        name, peer = "(a) long TTFT p50 beside streams", "one core, longs alone"
        rows.append(self._against(name, "ms", long_ttft, with_longs, alone, peer, at_most=1.2))
        rows.append(self._remote_share())
        one, peer = (Name.ONE_CORE, "interference", CONTROL), "one core, no longs at all"
        rows += [
            self._against("(a) ITL p99 with longs", "ms", itl_p99, with_longs, one, peer),
            self._against("(a) tokens/s with longs", "1/s", tokens, with_longs, one, peer),
        ]
        return rows

    def _remote_share(self) -> Row:
        """How many of the long prompts were really prefilled elsewhere: informs."""
        asked = [
            window.explained.get(answer.request_id, {}).get("path")
            for window in self._m.of(Name.PULLFILL, "interference", LONGS)
            for answer in stats.good(window.answers, Kind.LONG)
        ]
        return row("(a) long prompts prefilled remotely", asked.count("remote"), f"of {len(asked)}")

    def _beside_nixl(self) -> list[Row]:
        """Every form of it that was measured."""
        if not self._m.of(Name.PULLFILL, "interference", LONGS):
            return []
        rivals = [s.name for s in self._m.systems if s.name.startswith(Name.NIXL)]
        return [r for name in rivals for r in self._beside(name)]

    def _beside(self, rival: str) -> list[Row]:
        at = ("interference", LONGS)
        ours, theirs = (Name.PULLFILL, *at), (rival, *at)
        rows = [
            lower(self._against(f"{name} beside NIXL", unit, what, ours, theirs, rival))
            for name, unit, what in (
                ("long TTFT p50", "ms", long_ttft),
                ("ITL p99", "ms", itl_p99),
                ("CPU per request", "ms", cost),
            )
        ]
        mine, other = self._m.idle_cores(Name.PULLFILL), self._m.idle_cores(rival)
        name, unit = "idle CPU, all processes", "% of one core"
        if mine is None or not other:
            return [*rows, missing(name, rival, "not both were idle")]
        return [*rows, versus(name, 100 * mine, unit, rival, 100 * other, at_most=1 / 20)]

    def _chat(self) -> list[Row]:
        """By the decode worker's own account of its hit, not by the usage, for ours."""
        windows = self._m.of(Name.PULLFILL, "chat")
        shares = [share for w in windows for share in chat_shares(w)]
        if not windows:
            return []
        if not shares:
            return [missing("(d) prefix of later turns in the decode worker's cache", "", "failed")]
        name = "(d) prefix of later turns in the decode worker's cache"
        rows = [
            row(f"{name}, lowest turn", 100 * min(shares), "%", at_least=95.0),
            row(f"{name}, median", 100 * median(shares), "%", at_least=95.0),
        ]
        return [self._marked(r, windows) for r in rows]

    def _troubles(self) -> list[Row]:
        skipped = {t.system: t.what for t in self._m.troubles if t.skipped}
        rows = [missing(f"{name}: everything", "", what) for name, what in skipped.items()]
        for t in self._m.troubles:
            if t.skipped:
                continue
            last = t.what.strip().splitlines()[-1][:160] if t.what.strip() else ""
            what = f"{t.system}: {t.where} failed (repeat {t.repeat + 1})"
            rows.append(Row(metric=what, value=None, unit=f"not measured: {last}", ok=False))
        for (system, part), (bad, total, first) in failures(self._m.windows).items():
            what = f"{system}: failed requests, {part}"
            rows.append(row(what, bad, f"of {total}; first: {first[:120]}", 0))
        if self._m.cut:
            rows.append(Row(metric="the run was ended early", value=None, unit="", ok=False))
        dry = sorted({w.system for w in self._m.windows if w.result.dry})
        rows += [
            Row(metric=f"{name}: the load ran dry", value=None, unit="", ok=False) for name in dry
        ]
        return rows

    def _against(
        self,
        metric: str,
        unit: str,
        what: Callable[[Window], float],
        ours: tuple[str, str, str],
        theirs: tuple[str, str, str],
        peer: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> Row:
        value, other = self._m.over(*ours, what), self._m.over(*theirs, what)
        if value is None or other is None or value != value or other != other:
            return missing(metric, peer, f"{peer} gave no numbers")
        if other:
            r = versus(metric, value, unit, peer, other, at_most, at_least)
        else:  # no ratio to zero
            r = msgspec.structs.replace(row(metric, value, unit), peer=peer, peer_value=0.0)
        return self._marked(r, [*self._m.of(*ours), *self._m.of(*theirs)])

    def _marked(self, r: Row, windows: Iterable[Window]) -> Row:
        if all(w.quiet for w in windows):
            return r
        return msgspec.structs.replace(r, metric=r.metric + BUSY)


def lower(r: Row) -> Row:
    """Hold a comparison to be strictly below its peer; nothing at all is as good as nothing."""
    if r.value is None or r.peer_value is None:
        return r
    ok = r.value < r.peer_value or r.value == r.peer_value == 0
    return msgspec.structs.replace(r, target="ratio < 1", ok=ok)


def chat_shares(window: Window) -> list[float]:
    """Of every turn after the first: prefix tokens that were in the decode worker's cache."""
    lanes: dict[str, list[Answer]] = {}
    for answer in window.answers:
        lanes.setdefault(answer.ask.lane, []).append(answer)
    shares: list[float] = []
    for turns in lanes.values():
        whole = stats.good(turns)
        shares += stats.cached_share(whole, [_hit(window, a) for a in whole])
    return shares


def _hit(window: Window, answer: Answer) -> int:
    explained = window.explained.get(answer.request_id)
    hit = explained["prefix_hit_tokens"] if explained else answer.cached
    return int(hit or 0)
