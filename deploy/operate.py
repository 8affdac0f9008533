"""Orders to a running cluster: drain a worker, change settings, forget results.

Each function is a command. What cannot be done is a ConfigError or an UnavailableError.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import click
from rich.console import Console
from rich.table import Table

from pullfill.config import ClusterRef, ProcessId
from pullfill.deploy.members import AsJson, ask_worker, etcd_of, http_get, workers
from pullfill.deploy.state import identify, is_alive
from pullfill.errors import ConfigError, UnavailableError
from pullfill.net.this_host import host_id
from pullfill.options import Flag
from pullfill.registry import self_checks, suspect_records
from pullfill.registry.directory import revoke_worker
from pullfill.registry.live_settings import UNSET, find, read_all, store
from pullfill.wire import WorkerRecord


async def drain(
    ref: ClusterRef,
    instance_id: Annotated[str, Flag("", name="INSTANCE_ID")],
    *,
    wait: Annotated[bool, Flag("Return when it is gone")] = False,
    timeout_s: Annotated[float, Flag("Longest --wait, in seconds", metavar="S", least=0)] = 120.0,
) -> int:
    """Revoke the worker's lease, so that it drains. Return the exit code: 1 after `timeout_s`."""
    async with etcd_of(ref) as etcd:
        known = await workers(etcd, ref.namespace)
        worker = next((one for one in known if one.instance_id == instance_id), None)
        if worker is None:
            there = ", ".join(dict.fromkeys(one.instance_id for one in known)) or "none"
            raise ConfigError(f"no worker {instance_id!r} is registered; there are: {there}")
        # Before the revoke: afterwards the process may be gone and its pid another's.
        process = identify(worker.pid) if worker.host_id == host_id() else None
        report = await asyncio.to_thread(ask_worker, worker)
        if await revoke_worker(etcd, ref.namespace, instance_id) is None:
            click.echo(f"{instance_id} is already leaving")
    if report is not None and report.stays:
        click.echo(
            f"{instance_id} takes no more work from the cluster. Its process is stock vLLM, which "
            "serves its own clients until you end it"
        )
        return 0
    if report is not None and report.pod:
        click.echo(
            f"{instance_id} runs in the pod {report.pod}: its Deployment starts it again when it "
            f"has drained. For one {worker.role} fewer run `kubectl annotate pod {report.pod} "
            "controller.kubernetes.io/pod-deletion-cost=-1`, then scale the Deployment down by one "
            "(`kubectl scale`; with KEDA lower its max)"
        )
    if not wait:
        click.echo(f"{instance_id} drains: it takes no new work and exits when its work is done")
        return 0
    began = time.monotonic()
    with Console().status(f"{instance_id} drains ..."):
        while not await asyncio.to_thread(_gone, worker, process):
            if time.monotonic() - began > timeout_s:
                click.echo(
                    f"{instance_id} still drains after {timeout_s:.0f} s: wait longer with "
                    f"--timeout S, or end it with kill -9 {worker.pid} on {worker.host}"
                )
                return 1
            await asyncio.sleep(0.1)
    click.echo(f"{instance_id} is gone after {time.monotonic() - began:.1f} s")
    return 0


def _gone(worker: WorkerRecord, process: ProcessId | None) -> bool:
    if process is not None:
        return not is_alive(process)
    try:
        http_get(f"{worker.http}/live", 2.0)
    except UnavailableError:
        return True
    return False


async def config_get(
    ref: ClusterRef, key: Annotated[str | None, Flag("", name="[router.KEY|queue.KEY]")] = None
) -> int:
    """Print one setting, or all as `KEY VALUE` lines."""
    if key is not None:
        find(key)
    async with etcd_of(ref) as etcd:
        found = await read_all(etcd, ref.namespace)
    for name, value in found.items():
        shown = UNSET if value is None else value
        if key in (None, name):
            click.echo(shown if key else f"{name} {shown}")
    return 0


async def config_set(
    ref: ClusterRef,
    key: Annotated[str, Flag("", name="router.KEY|queue.KEY")],
    value: Annotated[str, Flag("", name="VALUE")],
) -> int:
    """Store one setting; workers that watch follow at once. Raises ConfigError for a bad one."""
    async with etcd_of(ref) as etcd:
        new = await store(etcd, ref.namespace, key, value)
    click.echo(f"{key} = {UNSET if new is None else new}")
    return 0


async def recheck(ref: ClusterRef) -> int:
    """Remove all failed self-checks. Connected workers compare again at once."""
    async with etcd_of(ref) as etcd:
        cleared = await self_checks.clear(etcd, ref.namespace)
    if cleared:
        click.echo(f"forgot {len(cleared)} failed self-check(s); the workers compare again now")
    else:
        click.echo("no self-check has failed: nothing to do")
    return 0


async def suspects(
    ref: ClusterRef,
    action: Annotated[str | None, Flag("", name="[clear]")] = None,
    fingerprint: Annotated[str | None, Flag("", name="[FINGERPRINT]")] = None,
    every: Annotated[bool, Flag("With clear: allow all refused requests", name="--all")] = False,
    as_json: AsJson = False,
) -> int:
    """Print the refused requests, or allow some again. Raises RegistryUnavailable, ConfigError."""
    if action is not None and (action != "clear" or (fingerprint is None) != every):
        raise ConfigError(
            "to allow requests again: `pullfill suspects clear FINGERPRINT`, or `clear --all`. "
            "`pullfill suspects` lists them"
        )
    async with etcd_of(ref) as etcd:
        rows = await suspect_records.posted(etcd, ref.namespace)
        if action is not None:
            names = [str(row["fingerprint"]) for row in rows]
            chosen = names if fingerprint is None else [fingerprint]
            for name in chosen:
                if not await suspect_records.clear(etcd, ref.namespace, name):
                    known = ", ".join(names) or "none"
                    raise ConfigError(f"{name!r} is not refused; refused are: {known}")
            click.echo(f"allowed again: {', '.join(chosen) or 'nothing was refused'}")
        elif as_json:
            click.echo(json.dumps(rows))
        else:
            told = suspects_table(rows) if rows else "no request is refused"
            Console().print(told, soft_wrap=True)
    return 0


def suspects_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the entries of `suspects` in `GET /pullfill/status`."""
    result = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("suspect", "state", "deaths", "prompt tokens", "for another"):
        result.add_column(column)
    for row in rows:
        deaths, tokens, left = row["deaths"], row["prompt_tokens"], f"{row['left_s']:.0f} s"
        result.add_row(row["fingerprint"], row["state"], str(deaths), str(tokens), left)
    return result
