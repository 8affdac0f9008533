"""`pullfill top`: the live page of a frontend, in a terminal. `pullfill requests`: what has ended.

Both read the events of the page. If the frontend of `top` goes away, what was seen stays on the
screen, and the next frontend that answers is shown. `top` ends with Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from typing import Annotated

import httpx
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import AsJson, OneUrl, frontend_urls, local_urls
from pullfill.deploy.top_view import Seen, count, ms, screen
from pullfill.deploy.view import plain
from pullfill.errors import ConfigError, UnavailableError
from pullfill.net import http_proof
from pullfill.options import Flag
from pullfill.snapshot import Ended, LiveSnapshot

PATH = "/pullfill/ui/events"
# A frontend sends something every 5 s: with many workers, comments between the snapshots.
_TIMEOUT = httpx.Timeout(5.0, read=10.0)
_NOBODY = "no frontend answers ({why}): try `pullfill doctor`"
# Columns where the output is no terminal.
_WIDTH = 80


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


def first_of_each(ref: ClusterRef, url: str | None) -> list[LiveSnapshot]:
    """Return the first, whole snapshot of each frontend that answers, one for each frontend.

    Raises UnavailableError if none answers, ConfigError if each that answers denies access."""
    found = dict[tuple[str, float], LiveSnapshot]()
    refused, why = list[ConfigError](), "no frontend is known"
    for where in [url] if url else frontend_urls(ref):
        try:
            with closing(_stream(ref, where.rstrip("/"), given=url is not None)) as told:
                snapshot = next(told)
                found[snapshot.frontend, snapshot.since] = snapshot
        except ConfigError as exc:
            refused.append(exc)
        except (httpx.HTTPError, msgspec.DecodeError, StopIteration) as exc:
            why = f"{where}: {exc or type(exc).__name__}"
    if refused and not found:
        raise refused[0]
    if not found:
        raise UnavailableError(_NOBODY.format(why=why))
    return list(found.values())


# --------------------------------------------------------------------------- the stream


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


# --------------------------------------------------------------------------- pullfill requests


def requests(
    ref: ClusterRef,
    url: OneUrl = None,
    most: Annotated[int, Flag("Show at most N requests", metavar="N", least=1)] = 25,
    as_json: AsJson = False,
) -> int:
    """Print requests of all frontends, the latest last.

    Raises UnavailableError if no frontend answers, ConfigError if each one that
    answers denies access."""
    rows = [row for snapshot in first_of_each(ref, url) for row in snapshot.ended]
    # A request without an end was cancelled. Nobody knows when, so it stands first.
    rows = sorted(rows, key=lambda row: row.at or 0.0)[-most:]
    if as_json:
        print(msgspec.json.encode(rows).decode())
    elif rows:
        Console().print(requests_table(rows), highlight=False)
        print("✓ TTFT and ITL within router.ttft_ms and router.itl_ms (or its own), ✕ not")
        print("`pullfill explain REQUEST` shows the stages of one")
    else:
        print("no request has ended yet")
    return 0


def requests_table(rows: Sequence[Ended]) -> Table:
    """Return a row for each request. Fits 80 columns. Ids are never shortened.

    The sign before the time says whether it was within its targets."""
    found = Table(box=None, padding=(0, 1, 0, 0))
    found.add_column("ended", no_wrap=True)
    found.add_column("request", overflow="fold", min_width=25)
    found.add_column("path", no_wrap=True)
    found.add_column("reason", overflow="fold")
    for name in ("in", "out", "TTFT", "ITL"):
        found.add_column(name, justify="right", no_wrap=True)
    signs = {True: Text("✓ ", style="green"), False: Text("✕ ", style="red"), None: Text("  ")}
    for row in rows:
        ended = time.strftime("%H:%M:%S", time.localtime(row.at)) if row.at else "cancel"
        found.add_row(
            signs[row.good] + ended, Text(plain(row.id)), plain(row.path),
            Text(plain(row.fallback or row.reason)),
            count(row.prompt), count(row.made), ms(row.ttft_ms), ms(row.itl_ms),
        )  # fmt: skip
    return found
