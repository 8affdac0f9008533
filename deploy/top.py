"""`pullfill top`: the live page of a frontend, in a terminal. It reads the events of the page.

If no frontend answers, it asks the workers themselves, as `pullfill page` does. If etcd does not
answer either, the last picture stays on the screen.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Annotated

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import OneUrl, frontend_urls, local_urls
from pullfill.deploy.status import workers_table
from pullfill.deploy.view import plain
from pullfill.engine import check
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.net import http_proof
from pullfill.options import PORT, Flag
from pullfill.snapshot import Flow, LiveSnapshot, Stage

PATH = "/pullfill/ui/events"
# A frontend sends something every 5 s: with many workers, comments between the snapshots.
_TIMEOUT = httpx.Timeout(5.0, read=10.0)
# Lines of a screen besides workers and requests.
_FIXED = 8
_STAGES = {
    Stage.ROUTE: ("decode worker", ""),
    Stage.PROMPT: ("decode worker", ""),
    Stage.QUEUE: ("queue", "yellow"),
    Stage.PREFILL: ("prefill", "blue"),
    Stage.KV: ("KV", "cyan"),
    Stage.DECODE: ("answer", "green"),
}


def top(
    ref: ClusterRef,
    url: OneUrl = None,
    once: Annotated[bool, Flag("Print one screen")] = False,
) -> int:
    """Show the cluster until the user ends it. Without a terminal, print one screen.

    Raises UnavailableError if nobody answers, ConfigError if a frontend refuses."""
    console = Console()
    with suppress(KeyboardInterrupt), closing(_snapshots(ref, url)) as snapshots:
        snapshot, trouble = next(snapshots)
        if once or not console.is_terminal:
            console.print(screen(snapshot, trouble, 1000), highlight=False)
            return 0
        with Live(
            screen(snapshot, trouble), console=console, screen=True, auto_refresh=False
        ) as shown:
            for found, trouble in snapshots:
                shown.update(screen(found, trouble, console.height), refresh=True)
    return 0


async def page(
    ref: ClusterRef,
    host: Annotated[str, Flag("Address to listen at", metavar="H")] = "127.0.0.1",
    port: Annotated[int, Flag("Port to listen at; 0 lets the system pick one", **PORT)] = 0,
) -> None:
    """Serve the live page until the user ends it. Raises UnavailableError if etcd does not."""
    check.require_version()  # it brings the HTTP server
    from pullfill.frontend.live import alone

    await alone.serve(ref, host, port, wait_s=5.0)


def _snapshots(
    ref: ClusterRef, url: str | None, again_s: float = 1.0
) -> Generator[tuple[LiveSnapshot, str], None, None]:
    """Yield for ever the last snapshot, and why there is no newer one. Empty: it is new.

    Raises UnavailableError and ConfigError as long as nobody has answered."""
    last: LiveSnapshot | None = None
    while True:
        why = "no frontend is known"
        for where in [url] if url else frontend_urls(ref):
            try:
                for last in _stream(ref, where.rstrip("/"), given=url is not None):
                    yield last, ""
                why = f"{where} has ended its stream"
            except ConfigError as exc:
                if last is None:
                    raise
                why = str(exc)
            except (httpx.HTTPError, msgspec.DecodeError) as exc:
                why = f"{where}: {exc or type(exc).__name__}"
            if last is not None:
                yield last, f"connecting again: {why}"
        try:
            if url:
                raise UnavailableError(f"no frontend answers ({why}): try `pullfill doctor`")
            last = asyncio.run(_of_workers(ref))
            yield last, why
        except PullfillError:
            if last is None:
                raise
        time.sleep(again_s)


async def _of_workers(ref: ClusterRef) -> LiveSnapshot:
    """Return what the workers tell. Raises UnavailableError if etcd does not answer."""
    check.require_version()
    from pullfill.frontend.live import alone

    async with alone.view_of(ref, wait_s=1.0) as live:
        return await live.look()


def _stream(ref: ClusterRef, url: str, *, given: bool) -> Generator[LiveSnapshot, None, None]:
    """Yield the snapshots of one frontend. Raises ConfigError if it refuses.

    given: the user has named it."""
    decoder = msgspec.json.Decoder(LiveSnapshot)
    # httpx's own context knows no authority of SSL_CERT_FILE, unless proxies are followed, too.
    tls = ssl.create_default_context()
    with httpx.Client(timeout=_TIMEOUT, trust_env=False, verify=tls) as client:
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
    """Yield the headers to try."""
    yield {}
    keys = ref.security.frontend
    # Whoever may write to etcd can announce a frontend. So keys go only to those that the user or
    # the state directory names.
    if given or url in {own.rstrip("/") for own in local_urls(ref)}:
        for key in (*keys.admin_keys(), *keys.api_keys()):
            yield {"Authorization": f"Bearer {key}"}
    else:
        for key in keys.api_keys():
            yield {http_proof.HEADER: http_proof.proof(key.encode(), PATH, time.time())}


def screen(snapshot: LiveSnapshot, trouble: str = "", height: int = 40) -> Group:
    """Return what to show.

    trouble: why there is nothing new. height: lines of the terminal."""
    room = max(4, height - _FIXED)
    rows = snapshot.workers[: max(2, room * 2 // 3)]
    # Requests on their way to a prefill worker and back first, then the oldest.
    flows = sorted(snapshot.flows, key=lambda f: (f.stage is Stage.DECODE, -f.age_s))
    flows = flows[: max(0, room - len(rows) - 2)]
    parts: list[RenderableType] = [
        _head(snapshot, trouble),
        _figures(snapshot),
        workers_table(rows),
    ]
    if hidden := len(snapshot.workers) - len(rows):
        parts.append(Text(f"and {hidden} more", style="dim"))
    if flows:
        parts.append(_flows(flows))
    return Group(*parts)


def ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _head(snapshot: LiveSnapshot, trouble: str) -> Text:
    text = Text("pullfill ", style="bold")
    others = f" (1 of {snapshot.frontends} frontends)" if snapshot.frontends > 1 else ""
    told_by = f"at {plain(snapshot.frontend)}{others}" if snapshot.frontend else "as workers tell"
    text.append(f"{plain(snapshot.model)} {told_by}", style="dim")
    text.append(time.strftime("  %H:%M:%S", time.localtime(snapshot.at)), style="dim")
    if trouble:
        text.append(f"\n{trouble}", style="bold yellow")
    for why in snapshot.outages():
        text.append(f"\n▲ {plain(why)}", style="bold red")
    return text


def _figures(snapshot: LiveSnapshot) -> Table:
    now, (ttft, itl) = snapshot.now, snapshot.targets_ms

    def pair(values: tuple[float, float] | None) -> str:
        return "–" if values is None else f"{ms(values[0])} / {ms(values[1])}"

    good = f"{100 * now.good_per_s / now.done_per_s:.0f} %" if now.done_per_s else "–"
    queue = "unknown"
    if snapshot.queue is not None:
        jobs, tokens = snapshot.queue.depth_jobs, snapshot.queue.depth_tokens
        queue = f"{seconds(now.backlog_s)} of work ({jobs} jobs, {tokens:,} tokens)"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("TTFT p50/p95", pair(now.ttft_ms), "tokens/s", f"{now.tokens_per_s:,.0f}")
    table.add_row("ITL p50/p95", pair(now.itl_ms), "requests/s", f"{now.done_per_s:.1f}")
    table.add_row(
        "goodput", f"{good} (TTFT {ms(ttft)}, ITL {ms(itl)})", "under way", str(now.in_flight)
    )
    table.add_row("queue", queue, "failed", str(now.failed))
    return table


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
        # Names that others gave are `Text`: in a `str` rich would read `[...]`.
        table.add_row(
            Text(plain(flow.id[-24:])), Text(stage, style=style), seconds(flow.stage_s), done,
            f"{tokens:,}", Text(plain(flow.prefill or flow.decode)),
        )  # fmt: skip
    return table
