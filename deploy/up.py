"""`pullfill up`: runs a supervisor, here or in the background, and tells when it is ready."""

from __future__ import annotations

import asyncio

import typer
from rich.console import Console

from pullfill.deploy.detach import Background, to_background
from pullfill.deploy.state import StateDir
from pullfill.deploy.supervisor import Interrupted, Supervisor
from pullfill.deploy.up_options import UpOptions
from pullfill.deploy.view import ProcessView

SUPERVISOR_LOG = "supervisor"
_LOG_WIDTH = 200


def up(options: UpOptions, state_dir: str | None, *, detach: bool) -> int:
    """Start a cluster and restart processes that die, until it is stopped. Return the exit code.

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
    view = ProcessView(Console(), "starting pullfill")
    supervisor = Supervisor(options, state, view)
    try:
        with view:
            await supervisor.start()
    except Interrupted:
        typer.echo("interrupted: everything that was started is stopped")
        return 130
    _say_ready(options, state, detach)
    if background is not None:
        background.ready(state.log_of(SUPERVISOR_LOG))
        view.console = Console(width=_LOG_WIDTH)
    elif detach:
        supervisor.let_go()
        return 0
    await supervisor.watch(detached=detach)
    typer.echo("stopped")
    return 0


def _say_ready(options: UpOptions, state: StateDir, detach: bool) -> None:
    if url := options.frontend_url:
        typer.echo(
            f"ready: {url}/v1 serves {options.model}\n"
            f"  curl {url}/v1/completions -H 'content-type: application/json' "
            f'-d \'{{"model": "{options.model}", "prompt": "Hello", "max_tokens": 32}}\''
        )
    else:
        typer.echo("ready (no frontend)")
    where = f" --state-dir {state.path}" if state.path.name != ".pullfill" else ""
    by_key = "" if detach else "Ctrl-C, or "
    typer.echo(f"  logs: {state.logs}\n  stop: {by_key}pullfill down{where}")
