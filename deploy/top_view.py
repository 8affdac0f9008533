"""The screens of `pullfill top`, of the cluster and of one worker. They fit 80 columns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pullfill.deploy.view import plain
from pullfill.errors import ConfigError
from pullfill.snapshot import (
    HISTORY_S,
    STEP_S,
    Flow,
    LiveSnapshot,
    Mark,
    Point,
    Stage,
    WorkerPoint,
    WorkerRow,
)

_BLOCKS = " ▁▂▃▄▅▆▇█"
# Columns of a history. Each covers 20 s.
_SPARK = 45
# Lines of a screen besides workers, requests and marks.
_FIXED = 14
# From so many lines on, two more histories are shown.
_TALL = 34
_MARKS = 3
_STATES = {"ready": ("●", "green"), "draining": ("◆", "yellow"), "lost": ("✕", "bold red")}
_LANES = {
    "decode worker": (Stage.ROUTE, Stage.PROMPT),
    "queue": (Stage.QUEUE,),
    "prefill": (Stage.PREFILL,),
    "KV": (Stage.KV,),
    "answer": (Stage.DECODE,),
}
_NAMES = {stage: lane for lane, stages in _LANES.items() for stage in stages}
_STYLES = {"queue": "yellow", "prefill": "blue", "KV": "cyan", "answer": "green"}
_SAID = {"outage": "does not answer", "lost": "is lost", "drain": "drains", "left": "left",
         "joined": "joined", "restarted": "was restarted"}  # fmt: skip


class Seen:
    """What was seen of a cluster: the last snapshot and the history. `take` each snapshot."""

    def __init__(self) -> None:
        self.snapshot: LiveSnapshot | None = None
        self._points: dict[float, Point] = {}

    def take(self, snapshot: LiveSnapshot) -> None:
        self.snapshot = snapshot
        self._points |= {point.at: point for point in snapshot.points}
        for at in [at for at in self._points if at < snapshot.at - HISTORY_S - STEP_S]:
            del self._points[at]

    @property
    def points(self) -> list[Point]:
        """The points of the history, oldest first."""
        return [self._points[at] for at in sorted(self._points)]


def screen(seen: Seen, trouble: str = "", height: int = 40) -> Group:
    """Return what to show.

    trouble: why there is nothing new. height: lines of the terminal."""
    snapshot = seen.snapshot
    if snapshot is None:
        return Group(Text(trouble or "waiting for the first snapshot", style="yellow"))
    workers = list(snapshot.workers)
    marks = list(snapshot.marks)[-_MARKS:]
    histories = _histories(seen.points, snapshot)
    if height < _TALL:
        histories = {name: history for name, history in histories.items() if name not in _MORE}
    room = max(4, height - _FIXED - len(marks) - len(histories) + 4)
    rows = min(len(workers), max(2, room * 2 // 3))
    flows = _interesting(snapshot.flows)[: max(0, room - rows - 2)]
    parts: list[RenderableType] = [
        head(snapshot, trouble),
        *_figures(snapshot),
        sparks(histories),
        _lanes(snapshot),
        _workers(workers[:rows], len(workers) - rows),
        *_decisions(seen.points),
    ]
    if flows:
        parts.append(_flows(flows))
    parts += [event(mark) for mark in reversed(marks)]
    return Group(*parts)


def _name(text: str) -> Text:
    """Return a table's cell with a name that others gave. As a `str`, rich would read `[...]`."""
    return Text(plain(text))


def ms(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 1000 else seconds(value / 1e3)


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 90 else f"{value / 60:.0f} min"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def count(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 10_000:
        return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
    return f"{value / 1e3:.1f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


def spark(values: Sequence[float | None], columns: int = _SPARK) -> str:
    """Return the values as blocks, the highest of each column. None: a gap."""
    per = max(1, -(-len(values) // columns))
    groups = [values[i : i + per] for i in range(0, len(values), per)]
    tops = [max((v for v in group if v is not None), default=None) for group in groups]
    highest = max((v for v in tops if v is not None), default=0.0)
    last = len(_BLOCKS) - 1
    return "".join(
        " " if v is None else _BLOCKS[min(last, 1 + int((last - 1) * v / highest))] if highest
        else _BLOCKS[1]
        for v in tops
    )  # fmt: skip


# --------------------------------------------------------------------------- parts


def head(snapshot: LiveSnapshot, trouble: str) -> Text:
    text = Text("pullfill ", style="bold")
    others = f" (1 of {snapshot.frontends} frontends)" if snapshot.frontends > 1 else ""
    text.append(f"{plain(snapshot.model)} at {plain(snapshot.frontend)}{others}", style="dim")
    text.append(time.strftime("  %H:%M:%S", time.localtime(snapshot.at)), style="dim")
    if trouble:
        text.append(f"\n{trouble}", style="bold yellow")
    for why in snapshot.outages():
        text.append(f"\n▲ {plain(why)}", style="bold red")
    return text


def _figures(snapshot: LiveSnapshot) -> Iterator[RenderableType]:
    now, (ttft, itl) = snapshot.now, snapshot.targets_ms

    def pair(values: tuple[float, float] | None) -> str:
        return "–" if values is None else f"{ms(values[0])} / {ms(values[1])}"

    good = f"{100 * now.good_per_s / now.done_per_s:.0f} %" if now.done_per_s else "–"
    queue = "unknown"
    if snapshot.queue is not None:
        jobs, tokens = snapshot.queue.depth_jobs, count(snapshot.queue.depth_tokens)
        queue = f"{seconds(now.backlog_s)} of work ({jobs} jobs, {tokens} tokens)"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("TTFT", f"{pair(now.ttft_ms)}", "tokens/s", count(now.tokens_per_s))
    table.add_row("ITL", f"{pair(now.itl_ms)}", "requests/s", count(now.done_per_s))
    table.add_row(
        "goodput", f"{good} (TTFT {ms(ttft)}, ITL {ms(itl)})", "under way", str(now.in_flight)
    )
    table.add_row("queue", queue, "failed", str(now.failed))
    yield table


def history(points: Sequence[Point], now: float) -> list[Point | None]:
    """Return the steps of the last 15 minutes, oldest first. None: nothing is known of one."""
    steps = {round(point.at / STEP_S): point for point in points}
    last = int(now // STEP_S)
    return [steps.get(index) for index in range(last - int(HISTORY_S // STEP_S) + 1, last + 1)]


# By name: the values, oldest first, and the function that formats one value.
Histories = dict[str, tuple[list[float | None], Callable[[float | None], str]]]
_MORE = ("ITL p95", "KV use")


def _histories(points: Sequence[Point], snapshot: LiveSnapshot) -> Histories:
    line = history(points, snapshot.at)
    decode = {row.instance_id for row in snapshot.workers if row.role == "decode"}

    def highest_kv(point: Point) -> float | None:
        found = [one.kv for name, one in point.workers.items() if name in decode]
        return max((kv for kv in found if kv is not None), default=None)

    return {
        "TTFT p95": ([p.ttft_ms[1] if p and p.ttft_ms else None for p in line], ms),
        "ITL p95": ([p.itl_ms[1] if p and p.itl_ms else None for p in line], ms),
        "tokens/s": ([p.tokens_per_s if p else None for p in line], count),
        "in target/s": ([p.good / p.seconds if p else None for p in line], count),
        "queue": ([p.backlog_s if p else None for p in line], seconds),
        "KV use": ([highest_kv(p) if p else None for p in line], percent),
    }


def sparks(histories: Histories) -> Table:
    """Return a row of blocks for each history, and its highest value."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for name, (values, written) in histories.items():
        top = written(max((v for v in values if v is not None), default=None))
        table.add_row(f"{name:<11}", Text(f"{spark(values):<{_SPARK}}", style="cyan"), f"max {top}")
    return table


def _lanes(snapshot: LiveSnapshot) -> Text:
    text = Text("")
    for number, (lane, stages) in enumerate(_LANES.items()):
        flows = [flow for flow in snapshot.flows if flow.stage in stages]
        longest = max((flow.stage_s or 0.0 for flow in flows), default=None)
        text.append(" → " if number else "", style="dim")
        text.append(f"{lane} ", style=_STYLES.get(lane, ""))
        text.append(str(len(flows)), style="bold")
        text.append(f" {seconds(longest)}" if longest is not None else "", style="dim")
    return text


def state(name: str) -> Text:
    """Return the state of a worker, with its sign."""
    sign, style = _STATES.get(name, ("•", ""))
    return Text(f"{sign} {plain(name)}", style=style)


def _workers(rows: Sequence[WorkerRow], hidden: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=26)
    for name in ("role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("KV", "run", "wait", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        high = "red" if row.kv is not None and row.kv > 0.9 else ""
        table.add_row(
            _name(row.instance_id), row.role, state(row.state),
            Text(percent(row.kv), style=high),
            count(row.running), count(row.waiting), count(row.tokens_per_s),
        )  # fmt: skip
    if hidden > 0:
        table.add_row(Text(f"and {hidden} more", style="dim"))
    if not rows:
        return Text("no worker is known", style="yellow")
    return table


def _decisions(points: Iterable[Point]) -> Iterator[Text]:
    counts: Counter[str] = Counter()
    for point in points:
        counts.update(point.decisions)
    if total := counts.total():
        said = [f"{plain(name)} {100 * n / total:.0f} %" for name, n in counts.most_common(5)]
        yield Text("prefilled: " + ", ".join(said), style="dim", no_wrap=True, overflow="ellipsis")


def _interesting(flows: Iterable[Flow]) -> list[Flow]:
    """Requests on their way to a prefill worker and back first, then the oldest."""
    return sorted(flows, key=lambda f: (f.stage is Stage.DECODE, -f.age_s))


def _flows(flows: Sequence[Flow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("request", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("stage", no_wrap=True)
    for name in ("for", "done", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=18)
    for flow in flows:
        lane = _NAMES[flow.stage]
        done = "" if flow.done is None else f"{100 * flow.done:.0f} %"
        tokens = flow.made if flow.stage is Stage.DECODE else flow.tokens
        style = _STYLES.get(lane, "")
        table.add_row(
            _name(flow.id[-24:]), Text(lane, style=style), seconds(flow.stage_s), done,
            count(tokens), _name(flow.prefill or flow.decode),
        )  # fmt: skip
    return table


def event(mark: Mark) -> Text:
    """Return what happened as one line."""
    at = time.strftime("%H:%M:%S", time.localtime(mark.at))
    lasts = (
        ""
        if mark.until is None or mark.until == mark.at
        else f" ({seconds(mark.until - mark.at)}, over)"
    )
    what = "answers again" if mark.until == mark.at else _SAID.get(mark.kind, mark.kind)
    more = f": {plain(mark.text)}" if mark.text and mark.until != mark.at else ""
    bad = "red" if mark.kind in ("outage", "lost") else "dim"
    return Text(
        f"{at} {plain(mark.who)} {what}{lasts}{more}", style=bad, no_wrap=True, overflow="ellipsis"
    )


# --------------------------------------------------------------------------- one worker


def check_worker(snapshot: LiveSnapshot, instance_id: str) -> None:
    """Raises ConfigError if no worker of this name is there, or was."""
    known = {row.instance_id for row in snapshot.workers}
    known |= {name for point in snapshot.points for name in point.workers}
    if instance_id in known:
        return
    near = get_close_matches(instance_id, sorted(known), n=1)
    there = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known)) or '-'}"
    raise ConfigError(f"no worker is called {instance_id!r}: {there}")


def worker_screen(seen: Seen, instance_id: str, trouble: str = "") -> Group:
    """Return what to show. trouble: why there is nothing new."""
    snapshot = seen.snapshot
    if snapshot is None:
        return Group(Text(trouble or "waiting for the first snapshot", style="yellow"))
    rows = [row for row in snapshot.workers if row.instance_id == instance_id]
    parts: list[RenderableType] = [head(snapshot, trouble), Text(plain(instance_id), style="bold")]
    parts += [_about(row) for row in rows] or [Text("this worker has left", style="yellow")]
    line = [point and point.workers.get(instance_id) for point in history(seen.points, snapshot.at)]
    known = [one or WorkerPoint() for one in line]
    parts.append(
        sparks(
            {
                "KV use": ([one.kv for one in known], percent),
                "running": ([one.running for one in known], count),
                "waiting": ([one.waiting for one in known], count),
                "tokens/s": ([one.tokens_per_s for one in known], count),
            }
        )
    )
    parts += [event(mark) for mark in reversed(snapshot.marks) if mark.who == instance_id]
    parts += [_load(row) for row in rows]
    return Group(*parts)


def _about(row: WorkerRow) -> Group:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    figures = f"KV {percent(row.kv)}, {count(row.running)} running, {count(row.waiting)} waiting"
    facts: dict[str, str | Text | None] = {
        "role": row.role,
        "state": state(row.state),
        "now": f"{figures}, {count(row.tokens_per_s)} tokens/s",
        "model": row.model,
        "host": f"{row.host}, pid {row.pid}, restarts: {row.restarts}",
        "pressure": None if row.pressure is None else f"{percent(row.pressure)} full",
        "its queue": None if row.backlog_s is None else f"{seconds(row.backlog_s)} of work",
    }
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, value if isinstance(value, Text) else Text(plain(value)))
    return Group(*(Text(plain(line), style="yellow") for line in row.troubles), table)


def _load(row: WorkerRow) -> Text:
    told = (
        f"{name}={count(value) if isinstance(value, int | float) else value}"
        for name, value in row.load.items()
        if isinstance(value, int | float | str)
    )
    return Text(plain("load: " + " ".join(told)), style="dim")
