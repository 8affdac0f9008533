"""`pullfill up` and `pullfill down`, as the CLI calls them. Returns are exit codes."""

from __future__ import annotations

import asyncio
import signal

from rich.console import Console

from pullfill.config import ProcessEntry
from pullfill.deploy.plan import UpOptions
from pullfill.deploy.procs import is_alive
from pullfill.deploy.state import StateDir, identity
from pullfill.deploy.supervisor import Interrupted, Supervisor
from pullfill.deploy.teardown import stop_stragglers, take_down
from pullfill.deploy.view import ProcessView
from pullfill.errors import ConfigError


def up(options: UpOptions, state_dir: str | None, *, detach: bool) -> int:
    """Start a cluster; detached, return when it is ready, else stay until it is stopped."""
    return asyncio.run(_up(options, StateDir(state_dir), detach))


async def _up(options: UpOptions, state: StateDir, detach: bool) -> int:
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
    if detach:
        supervisor.let_go()
        return 0
    await supervisor.watch()
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
    with state.locked():
        entries = _entries(state, console)
        launch = state.launch()
        if not entries and launch is None:
            console.print(f"nothing runs from {state.path}", soft_wrap=True)
            state.clear()
            return 0
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
    return 0 if not state.live() else 1


def _entries(state: StateDir, console: Console) -> list[ProcessEntry]:
    """The recorded processes. A damaged record must not keep the rest from being stopped."""
    try:
        cluster = state.cluster()
    except ConfigError as exc:
        launch = state.launch()
        count = stop_stragglers(launch.cluster_id) if launch else 0
        console.print(f"{exc}; found by their environment and killed: {count}", soft_wrap=True)
        return []
    return cluster.processes if cluster else []
