"""`pullfill top`: the live page of a frontend, in a terminal. It reads the events of the page.

If the frontend goes away, what was seen stays on the screen, and the next frontend that answers is
shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from typing import Annotated

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import OneUrl, frontend_urls, local_urls
from pullfill.deploy.view import plain
from pullfill.errors import ConfigError, UnavailableError
from pullfill.net import http_proof
from pullfill.options import Flag
from pullfill.snapshot import (
    HISTORY_S,
    STEP_S,
    Flow,
    LiveSnapshot,
    Mark,
    Point,
    Stage,
    WorkerRow,
)

PATH = "/pullfill/ui/events"
# A frontend sends something every 5 s: with many workers, comments between the snapshots.
_TIMEOUT = httpx.Timeout(5.0, read=10.0)
_NOBODY = "no frontend answers ({why}): try `pullfill doctor`"
# Columns where the output is no terminal.
_WIDTH = 80
_BLOCKS = " ▁▂▃▄▅▆▇█"
# Columns of a history. Each covers 20 s.
_SPARK = 45
# Lines of a screen besides workers, requests and marks.
_FIXED = 12
_MARKS = 3
_STATES = {"ready": ("●", "green"), "draining": ("◆", "yellow"), "lost": ("✕", "bold red")}
_STAGES = {
    Stage.ROUTE: ("decode worker", ""),
    Stage.PROMPT: ("decode worker", ""),
    Stage.QUEUE: ("queue", "yellow"),
    Stage.PREFILL: ("prefill", "blue"),
    Stage.KV: ("KV", "cyan"),
    Stage.DECODE: ("answer", "green"),
}
_SAID = {"outage": "does not answer", "lost": "is lost", "drain": "drains", "left": "left",
         "joined": "joined", "restarted": "was restarted"}  # fmt: skip


def top(
    ref: ClusterRef,
    url: OneUrl = None,
    once: Annotated[bool, Flag("Print one screen")] = False,
) -> int:
    """Show the cluster until the user ends it. Without a terminal, print one screen.

    Raises UnavailableError if no frontend answers, ConfigError if one refuses."""
    console, seen = Console(), Seen()
    once |= not console.is_terminal
    with suppress(KeyboardInterrupt), closing(_snapshots(ref, url)) as snapshots:
        live = nullcontext() if once else Live(console=console, screen=True, auto_refresh=False)
        with live as shown:
            for found in snapshots:
                if isinstance(found, LiveSnapshot):
                    seen.take(found)
                if shown is None:
                    width = console.width if console.is_terminal else _WIDTH
                    Console(width=width).print(screen(seen, height=1000), highlight=False)
                    break
                trouble = found if isinstance(found, str) else ""
                shown.update(screen(seen, trouble, console.height), refresh=True)
    return 0


def _snapshots(
    ref: ClusterRef, url: str | None, again_s: float = 1.0
) -> Generator[LiveSnapshot | str, None, None]:
    """Yield snapshots for ever, and why there is none.

    Raises UnavailableError and ConfigError as long as no frontend has answered."""
    answered = False
    while True:
        why = "no frontend is known"
        for where in [url] if url else frontend_urls(ref):
            try:
                for snapshot in _stream(ref, where.rstrip("/"), given=url is not None):
                    answered = True
                    yield snapshot
                why = f"{where} has ended its stream"
            except ConfigError as exc:
                if not answered:
                    raise
                why = str(exc)
            except (httpx.HTTPError, msgspec.DecodeError) as exc:
                why = f"{where}: {exc or type(exc).__name__}"
            if answered:
                yield f"connecting again: {why}"
        if not answered:
            raise UnavailableError(_NOBODY.format(why=why))
        time.sleep(again_s)


def _stream(ref: ClusterRef, url: str, *, given: bool) -> Generator[LiveSnapshot, None, None]:
    """Yield the snapshots of one frontend. Raises ConfigError if it refuses.

    given: the user has named it."""
    decoder = msgspec.json.Decoder(LiveSnapshot)
    with httpx.Client(timeout=_TIMEOUT, trust_env=False, verify=True) as client:
        for headers in _shown_to(ref, url, given):
            with client.stream("GET", url + PATH, headers=headers) as answer:
                if answer.status_code in (401, 403):
                    continue
                if answer.status_code != 200:
                    raise ConfigError(f"{url}{PATH} answers {answer.status_code}")
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        yield decoder.decode(line[6:])
                return
    raise ConfigError(
        f"{url} shows this to administrators only: name the --security file that has "
        "[frontend] admin_key_file, or run this on the machine of the frontend with --url "
        f"{httpx.URL(url).copy_with(host='127.0.0.1')}"
    )


def _shown_to(ref: ClusterRef, url: str, given: bool) -> Iterator[dict[str, str]]:
    """Yield the headers to try.

    Whoever may write to etcd can announce a frontend. So keys go only to those that the user or the
    state directory names."""
    yield {}
    keys = ref.security.frontend
    if given or url in {own.rstrip("/") for own in local_urls(ref)}:
        for key in (*keys.admin_keys(), *keys.api_keys()):
            yield {"Authorization": f"Bearer {key}"}
    else:
        for key in keys.api_keys():
            yield {http_proof.HEADER: http_proof.proof(key.encode(), PATH, time.time())}


# --------------------------------------------------------------------------- the screen


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
    room = max(4, height - _FIXED - len(marks))
    rows = min(len(workers), max(2, room * 2 // 3))
    flows = _interesting(snapshot.flows)[: max(0, room - rows - 2)]
    parts: list[RenderableType] = [
        _head(snapshot, trouble),
        *_figures(snapshot),
        _sparks(seen.points, snapshot.at),
        _workers(workers[:rows], len(workers) - rows),
    ]
    if flows:
        parts.append(_flows(flows))
    parts += [_event(mark) for mark in reversed(marks)]
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


def _head(snapshot: LiveSnapshot, trouble: str) -> Text:
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


def _sparks(points: Sequence[Point], now: float) -> Table:
    """Return a row for each figure: its history of 15 minutes as blocks, and its highest value."""
    known = {round(point.at / STEP_S): point for point in points}
    last = int(now // STEP_S)
    steps = [known.get(last - back) for back in reversed(range(int(HISTORY_S // STEP_S)))]
    rows: dict[str, tuple[list[float | None], Callable[[float | None], str]]] = {
        "TTFT p95": ([p.ttft_ms[1] if p and p.ttft_ms else None for p in steps], ms),
        "tokens/s": ([p.tokens_per_s if p else None for p in steps], count),
        "in target/s": ([p.good / p.seconds if p else None for p in steps], count),
        "queue": ([p.backlog_s if p else None for p in steps], seconds),
    }
    table = Table.grid(padding=(0, 1, 0, 0))
    for name, (values, written) in rows.items():
        top = written(max((v for v in values if v is not None), default=None))
        table.add_row(f"{name:<11}", Text(f"{spark(values):<{_SPARK}}", style="cyan"), f"max {top}")
    return table


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
        stage, style = _STAGES[flow.stage]
        done = "" if flow.done is None else f"{100 * flow.done:.0f} %"
        tokens = flow.made if flow.stage is Stage.DECODE else flow.tokens
        table.add_row(
            _name(flow.id[-24:]), Text(stage, style=style), seconds(flow.stage_s), done,
            count(tokens), _name(flow.prefill or flow.decode),
        )  # fmt: skip
    return table


def _event(mark: Mark) -> Text:
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
