"""`pullfill up`: runs a supervisor and tells when the cluster is ready.

With --detach the command forks before it starts anything. The child becomes the supervisor, in a
session of its own. It writes to the terminal until the cluster is ready. Until then the parent
waits and passes signals to it. The parent's exit code tells whether the cluster has started.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Annotated

import click

from pullfill.deploy import members, plan, vllm_flags
from pullfill.deploy.state import StateDir, exit_words
from pullfill.deploy.supervisor import Supervisor
from pullfill.deploy.view import ProcessView, SteadyConsole
from pullfill.errors import UnavailableError
from pullfill.net.security import load
from pullfill.options import ClusterOptions, Flag, FrontendOptions, UpOptions, WorkerOptions

SUPERVISOR_LOG = "supervisor"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_SET = "A setting, as of `pullfill config set`. Stored before workers start. Repeatable"


def command(
    options: UpOptions,
    cluster: ClusterOptions,
    workers: WorkerOptions,
    frontend: FrontendOptions,
    vllm_args: Sequence[str],
    detach: Annotated[bool, Flag("Return once all is ready")] = False,
    for_all: Annotated[
        str | None,
        Flag("vLLM flags of all processes, as one text", name="--vllm-args", metavar="FLAGS"),
    ] = None,
    decode_args: Annotated[
        str | None, Flag('vLLM flags of decode workers only, e.g. "-tp 2"', metavar="FLAGS")
    ] = None,
    prefill_args: Annotated[
        str | None, Flag("vLLM flags of prefill workers only", metavar="FLAGS")
    ] = None,
    settings: Annotated[list[str] | None, Flag(_SET, name="--set", metavar="KEY=VALUE")] = None,
) -> int:
    """Combine what the command line gives, and start a cluster. Raises ConfigError."""
    decode = vllm_flags.of_role("--decode-args", decode_args)
    prefill = vllm_flags.of_role("--prefill-args", prefill_args)
    options = replace(
        options,
        workers=workers,
        frontend=frontend,
        namespace=cluster.namespace or "default",
        etcd_url=cluster.etcd,
        nats_url=cluster.nats,
        security=load(cluster.security),
        settings=list(settings or ()),
        vllm_args=[*vllm_flags.of_role("--vllm-args", for_all), *vllm_args],
        role_args={
            "decode": decode,
            "frontend": vllm_flags.for_frontend(decode),
            "prefill": prefill,
        },
    )
    return up(options, StateDir(cluster.state_dir), detach=detach)


def up(options: UpOptions, state: StateDir, *, detach: bool) -> int:
    """Start a cluster and restart processes that die, until it is stopped. Return the exit code.

    detach: return when the cluster is ready. A supervisor goes on in the background."""
    pipe: int | None = None
    if detach:
        reading, pipe = os.pipe()
        if child := _fork(pipe):
            os.close(pipe)
            return _wait_for(child, reading)
    return asyncio.run(_up(options, state, detach, pipe))


async def _up(options: UpOptions, state: StateDir, detach: bool, pipe: int | None) -> int:
    view = ProcessView(SteadyConsole())
    supervisor = Supervisor(options, state, view)
    if not await supervisor.start():
        view.say("interrupted: everything that was started is stopped")
        return 130
    with suppress(OSError):  # nobody reads our output any more
        _say_ready(options, state, detach)
    if pipe is not None:
        _leave_terminal(state.log_of(SUPERVISOR_LOG), pipe)
        view.console = SteadyConsole()  # standard output is the log now
    await supervisor.watch(detached=detach)
    view.say("stopped")
    return 0


def _say_ready(options: UpOptions, state: StateDir, detach: bool) -> None:
    if url := options.frontend_url:
        name = plan.served_name(options)
        body = json.dumps({"model": name, "prompt": "Hello", "max_tokens": 32})
        click.echo(
            f"ready: {url}/v1 serves {name}\n"
            f"  curl {url}/v1/completions -H 'content-type: application/json' -d {quote(body)}"
        )
    else:
        click.echo("ready (no frontend)")
    if options.frontends and not options.decodes:
        for why in members.why_not_ready(options.frontend_url, within_s=5.0):
            click.echo(f"  but not yet: {why}")
    where = "" if state.path == StateDir().path else f" --state-dir {quote(str(state.path))}"
    by_key = "" if detach else "Ctrl-C, or "
    if options.frontend_url:
        click.echo(f"  watch: {options.frontend_url}/pullfill/ui, or pullfill top{where}")
    click.echo(f"  logs: {state.logs}\n  stop: {by_key}pullfill down{where}")


def _fork(pipe: int) -> int:
    """Fork. Return the child's pid, or 0 in the child. No other thread may run in this process.

    The signals that `_wait_for` passes on stay blocked in the parent until it can.
    pipe: the only file that the child keeps, besides the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        stdin = os.open(os.devnull, os.O_RDONLY)
        os.dup2(stdin, 0)
        # Close what the caller had open, such as a lock or a pipe. The cluster must not keep it.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return child


def _leave_terminal(log: Path, pipe: int) -> None:
    """Let the parent return. Output of this process goes to `log` from now on."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:  # a full disk must not end the cluster
        fd = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    with suppress(BrokenPipeError):  # the parent was killed
        os.write(pipe, b"1")
    os.close(pipe)


def _wait_for(child: int, pipe: int) -> int:
    """Wait until the child is ready or has ended. Return the exit code of the command.

    Raises UnavailableError if the child was killed."""

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    if os.read(pipe, 1):
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        raise UnavailableError(f"the start was {exit_words(code)}: clean up with `pullfill down`")
    return code
