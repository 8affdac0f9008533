"""`pullfill up --dry-run`: checks what `up` checks, and prints what it would start.

Nothing is started, written or reserved. Ports that `up` chooses at its start are shown as PORT."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from itertools import pairwise

import typer

from pullfill import redact
from pullfill.config import ClusterRef
from pullfill.deploy import plan
from pullfill.deploy.state import StateDir
from pullfill.deploy.up_options import UpOptions

_TOLD = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables that say where a worker runs."""


def show(options: UpOptions, state_dir: str | None) -> int:
    """Print the processes that `up` would start. Raises ConfigError as `up` would."""
    state = StateDir(state_dir)
    state.refuse_if_live()
    plan.check(options)
    for line in lines(options, state):
        typer.echo(line)
    return 0


def lines(options: UpOptions, state: StateDir) -> Iterator[str]:
    """Yield what would start: one line for each process, its command line below it."""
    yield f"would start in {state.path}, namespace {options.namespace}:"
    for name, url in (("nats", options.nats_url), ("etcd", options.etcd_url)):
        yield f"  {name:<12} {f'not started: {redact.url(url)}' if url else 'at 127.0.0.1:PORT'}"
    ref = ClusterRef(
        options.namespace,
        options.etcd_url or "http://127.0.0.1:PORT",
        options.nats_url or "nats://127.0.0.1:PORT",
        state.path,
        options.security,
    )
    for spec in plan.worker_specs(options, ref, "dry-run"):
        notes = [spec.url, *(f"{n}={spec.env[n]}" for n in _TOLD if _is_ours(spec.env, n))]
        notes += [f"after {spec.after} is ready"] if spec.after else []
        yield f"  {spec.name:<12} {' '.join(filter(None, notes))}".rstrip()
        yield f"    {shlex.join(_command(spec))}"
    for text in options.settings:
        yield f"  setting      {text}"
    if options.frontend_url:
        yield f"clients: {options.frontend_url}/v1"


def _is_ours(env: dict[str, str], name: str) -> bool:
    """Whether `up` sets the variable, and not the user."""
    return name in env and env[name] != os.environ.get(name)


def _command(spec: plan.ProcessSpec) -> list[str]:
    """Return the command as a user would type it, but for logins in URLs."""
    argv = spec.argv[spec.argv.index(spec.role) :]
    if spec.instance_id in argv:  # a new one at each start
        at = argv.index(spec.instance_id)
        argv = argv[: at - 1] + argv[at + 1 :]
    # What follows an @ there is an address of KV, and logins are refused.
    stock = next((arg for flag, arg in pairwise(argv) if flag == "--servers"), "")
    return ["pullfill", *(arg if arg == stock else redact.text(arg) for arg in argv)]
