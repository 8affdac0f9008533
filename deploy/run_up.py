"""`pullfill up` and `pullfill down`, as the CLI calls them. Returns are exit codes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from rich.console import Console

from pullfill.config import ClusterRef, ProcessEntry
from pullfill.deploy.detach import Background, to_background
from pullfill.deploy.members import etcd_of, workers
from pullfill.deploy.procs import is_alive, send, start_time
from pullfill.deploy.state import Locked, StateDir, identity
from pullfill.deploy.supervisor import Interrupted, Supervisor
from pullfill.deploy.teardown import SERVER_DEADLINE_S, stop_stragglers, take_down
from pullfill.deploy.up_options import UpOptions
from pullfill.deploy.view import ProcessView
from pullfill.errors import ConfigError, PullfillError
from pullfill.net.this_host import host_id

SUPERVISOR_LOG = "supervisor"
_LOG_WIDTH = 200
_PATIENCE_S = 0.5
"""How long to wait for the lock. A supervisor that restarts a process holds it shorter."""


def up(options: UpOptions, state_dir: str | None, *, detach: bool) -> int:
    """Start a cluster and restart processes that die, until the cluster is stopped.

    detach: return when the cluster is ready. A supervisor goes on in the background."""
    background: Background | None = None
    if detach and options.restart:
        found = to_background()
        if isinstance(found, int):
            return found
        background = found
    return asyncio.run(_up(options, StateDir(state_dir), detach, background))


async def _up(
    options: UpOptions, state: StateDir, detach: bool, background: Background | None
) -> int:
    console = Console()
    view = ProcessView(console, "starting pullfill")
    supervisor = Supervisor(options, state, view)
    try:
        with view:
            await supervisor.start()
    except Interrupted:
        console.print("interrupted: everything that was started is stopped")
        return 130
    _say_ready(console, options, state, detach)
    if background is not None:
        background.ready(state.log_of(SUPERVISOR_LOG))
        view.console = console = Console(width=_LOG_WIDTH)
    elif detach:
        supervisor.let_go()
        return 0
    await supervisor.watch(detached=detach)
    console.print("stopped")
    return 0


def _say_ready(console: Console, options: UpOptions, state: StateDir, detach: bool) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    where = f" --state-dir {state.path}" if state.path.name != ".pullfill" else ""
    if options.frontend_url:
        say(f"ready: {options.frontend_url}/v1 serves {options.model}")
        say(
            f"  curl {options.frontend_url}/v1/completions -H 'content-type: application/json' "
            f'-d \'{{"model": "{options.model}", "prompt": "Hello", "max_tokens": 32}}\''
        )
    else:
        say("ready (no frontend)")
    say(f"  logs: {state.logs}")
    stop = f"pullfill down{where}"
    say(f"  stop: {stop}" if detach else f"  stop: Ctrl-C, or {stop}")


def down(state_dir: str | None, *, timeout_s: float) -> int:
    """Stop the cluster of a state directory, also when its `up` was killed."""
    return asyncio.run(_down(StateDir(state_dir), timeout_s))


async def _down(state: StateDir, timeout_s: float) -> int:
    console = Console()
    if not state.path.is_dir():
        console.print(f"nothing runs from {state.path}", soft_wrap=True)
        return 0
    signals = 0
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        nonlocal signals
        signals += 1

    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, on_signal)
    async with _locked_for_down(state, console, timeout_s):
        entries = _entries(state, console)
        launch = state.launch()
        if not entries and launch is None:
            console.print(f"nothing runs from {state.path}", soft_wrap=True)
            state.clear()
            return 0
        strangers = await _by_hand(state, entries)
        live = [entry for entry in entries if is_alive(identity(entry))]
        view = ProcessView(console, "stopping pullfill")
        with view:
            killed = await take_down(
                state, entries, view, drain_s=timeout_s, force=lambda: signals > 0
            )
    stopped = len(live) - len(killed)
    gone = len(entries) - len(live)
    text = f"stopped {stopped} of {len(live)} processes in order"
    text += f", killed {', '.join(killed)}" if killed else ""
    text += f"; {gone} had ended before" if gone else ""
    console.print(text, soft_wrap=True)
    for name, pid in strangers:
        console.print(
            f"{name} (pid {pid}) was started by hand and still runs: stop it with kill {pid}",
            soft_wrap=True,
        )
    return 0 if not state.live() else 1


@asynccontextmanager
async def _locked_for_down(
    state: StateDir, console: Console, timeout_s: float
) -> AsyncIterator[None]:
    """The lock of the directory. An `up` that is still starting is told to stop and undoes its
    start itself; one that is stopping already is waited for."""
    began = time.monotonic()
    deadline = began + timeout_s + 2 * SERVER_DEADLINE_S
    told = False
    while True:
        with ExitStack() as held:
            try:
                held.enter_context(state.locked())
            except Locked:
                launch = state.launch()
                if time.monotonic() > deadline:
                    raise
                patient = time.monotonic() < began + _PATIENCE_S
                if launch and not told and not patient and not state.stopping():
                    pid = launch.supervisor_pid
                    console.print(f"stopping the `pullfill up` that is starting (pid {pid})")
                    told = send(launch.supervisor, signal.SIGTERM)
                await asyncio.sleep(0.1)
                continue
            yield
            return


async def _by_hand(state: StateDir, entries: list[ProcessEntry]) -> list[tuple[str, int]]:
    """Workers of this machine that joined the cluster but were not started by `up`."""
    ours = {entry.pid for entry in entries}
    try:
        ref = ClusterRef.resolve(state_dir=state.path)
        async with etcd_of(ref, wait_s=0.5) as etcd:
            records = await workers(etcd, ref.namespace)
    except PullfillError:
        return []
    here = [r for r in records if r.host_id == host_id() and r.pid not in ours]
    return [(r.instance_id, r.pid) for r in here if start_time(r.pid) is not None]


def _entries(state: StateDir, console: Console) -> list[ProcessEntry]:
    """Return the recorded processes. If the record is damaged, kill all and return none."""
    try:
        cluster = state.cluster()
    except ConfigError as exc:
        launch = state.launch()
        count = stop_stragglers(launch.cluster_id) if launch else 0
        console.print(f"{exc}; found by their environment and killed: {count}", soft_wrap=True)
        return []
    return cluster.processes if cluster else []
