"""`pullfill top`: the live page of a frontend, in a terminal. With an instance id: one worker.

Reads the same events as the page. If the frontend goes away, what was seen stays on the screen, and
the next frontend that answers is shown. Ends with Ctrl-C or `q`.

Where the output is no terminal, one screen is printed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Annotated

import httpx
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import AsJson, OneUrl, frontend_urls, local_urls
from pullfill.deploy.top_view import Seen, check_worker, count, ms, screen, worker_screen
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
    worker: Annotated[str | None, Flag("", name="[INSTANCE_ID]")] = None,
) -> int:
    """Show the cluster, or one worker, until the user ends it.

    url: of a frontend. None: those of the cluster. worker: its instance id.
    Raises UnavailableError if no frontend answers, ConfigError if one refuses."""
    console = Console()
    snapshots = _snapshots(ref, url)
    if worker is not None:
        snapshots = _checked(snapshots, worker)

    def shown(seen: Seen, trouble: str, height: int) -> RenderableType:
        if worker is not None:
            return worker_screen(seen, worker, trouble)
        return screen(seen, trouble, height)

    if once or not console.is_terminal:
        seen = Seen()
        found = next(snapshots)
        assert isinstance(found, LiveSnapshot)
        seen.take(found)
        snapshots.close()
        width = console.width if console.is_terminal else _WIDTH
        Console(width=width).print(shown(seen, "", 1000), highlight=False)
        return 0
    with suppress(KeyboardInterrupt):
        _watch(console, snapshots, shown)
    return 0


def _checked(
    snapshots: Generator[LiveSnapshot | str, None, None], worker: str
) -> Generator[LiveSnapshot | str, None, None]:
    """Yield the same. Raises ConfigError if the first snapshot does not know the worker."""
    first = next(snapshots)
    assert isinstance(first, LiveSnapshot)
    check_worker(first, worker)
    yield first
    yield from snapshots


def first_of_each(ref: ClusterRef, url: str | None) -> list[LiveSnapshot]:
    """Return the first, whole snapshot of each frontend that answers, one for each frontend.

    Raises UnavailableError if none answers, ConfigError if each that answers denies access."""
    found = dict[tuple[str, float], LiveSnapshot]()
    refused, why = list[ConfigError](), "no frontend is known"
    for where in [url] if url else frontend_urls(ref):
        try:
            with contextlib.closing(_stream(ref, where.rstrip("/"), given=url is not None)) as told:
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


def _watch(
    console: Console,
    snapshots: Iterator[LiveSnapshot | str],
    shown: Callable[[Seen, str, int], RenderableType],
) -> None:
    """Show each snapshot. A text is a trouble."""
    seen = Seen()
    with _q_ends(), Live(console=console, screen=True, auto_refresh=False) as live:
        for found in snapshots:
            trouble = found if isinstance(found, str) else ""
            if isinstance(found, LiveSnapshot):
                seen.take(found)
            live.update(shown(seen, trouble, console.height), refresh=True)


@contextlib.contextmanager
def _q_ends() -> Iterator[None]:
    """While open, `q` does what Ctrl-C does."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    closed_r, closed_w = os.pipe()

    def read() -> None:
        while True:
            ready, _, _ = select.select([descriptor, closed_r], [], [])
            if closed_r in ready:
                return
            if os.read(descriptor, 1) in (b"q", b"Q", b""):
                os.kill(os.getpid(), signal.SIGINT)
                return

    # A shell that starts a command in the background lets it ignore SIGINT.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    tty.setcbreak(descriptor)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        os.close(closed_w)
        reader.join(1.0)
        os.close(closed_r)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGINT, interrupt)


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
