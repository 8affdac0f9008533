"""Orders to a running cluster: drain one worker, read and change settings, check workers again."""

from __future__ import annotations

import asyncio
import time

import typer
from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy.members import ask_etcd, ask_worker, etcd_of, http_get, workers
from pullfill.deploy.procs import ProcessId, identify, is_alive
from pullfill.errors import ConfigError, UnavailableError
from pullfill.net.this_host import host_id
from pullfill.registry import self_checks
from pullfill.registry.client import EtcdClient
from pullfill.registry.orders import revoke_worker
from pullfill.registry.settings import UNSET, Settings, find, root_of, store
from pullfill.wire import QueueSettings, RouterConfig, WorkerRecord

_POLL_S = 0.1


def drain(ref: ClusterRef, instance_id: str, *, wait: bool, timeout_s: float) -> int:
    """Revoke the worker's lease, so that it drains. Return the exit code.

    wait: return when its process is gone, or 1 after `timeout_s`."""
    return asyncio.run(_drain(ref, instance_id, wait, timeout_s))


async def _drain(ref: ClusterRef, instance_id: str, wait: bool, timeout_s: float) -> int:
    async with etcd_of(ref) as etcd:
        known = {record.instance_id: record for record in await workers(etcd, ref.namespace)}
        if instance_id not in known:
            there = ", ".join(known) or "none"
            raise ConfigError(f"no worker {instance_id!r} is registered; there are: {there}")
        worker = known[instance_id]
        # Before the revoke: afterwards the process may be gone and its pid another's.
        process = identify(worker.pid) if worker.host_id == host_id() else None
        report = await asyncio.to_thread(ask_worker, worker)
        if await revoke_worker(etcd, ref.namespace, instance_id) is None:
            typer.echo(f"{instance_id} is already leaving")
    if report is not None and report.pod:
        typer.echo(
            f"{instance_id} runs in the pod {report.pod}: its Deployment starts it again when it "
            f"has drained. For one {worker.role} fewer run `kubectl annotate pod {report.pod} "
            "controller.kubernetes.io/pod-deletion-cost=-1`, then scale the Deployment down by one "
            "(`kubectl scale`; with KEDA lower its max)"
        )
    if not wait:
        typer.echo(f"{instance_id} drains: it takes no new work and exits when its work is done")
        return 0
    began = time.monotonic()
    with Console().status(f"{instance_id} drains ..."):
        while await asyncio.to_thread(_still_there, worker, process):
            if time.monotonic() - began > timeout_s:
                typer.echo(
                    f"{instance_id} still drains after {timeout_s:.0f} s: wait longer with "
                    f"--timeout S, or end it with kill -9 {worker.pid} on {worker.host}"
                )
                return 1
            await asyncio.sleep(_POLL_S)
    typer.echo(f"{instance_id} is gone after {time.monotonic() - began:.1f} s")
    return 0


def _still_there(worker: WorkerRecord, process: ProcessId | None) -> bool:
    if process is not None:
        return is_alive(process)
    if not worker.http:
        return False
    try:
        http_get(f"{worker.http}/live", 2.0)
    except UnavailableError:
        return False
    return True


def config_get(ref: ClusterRef, key: str | None) -> int:
    """Print one setting, or all as `KEY VALUE` lines."""

    async def all_of(etcd: EtcdClient, namespace: str) -> dict[str, object]:
        kinds = (RouterConfig, QueueSettings)
        router, queue = [await Settings(etcd, namespace, kind).get_all() for kind in kinds]
        return router | queue

    if key is not None:
        kind, name = find(key)
        key = f"{root_of(kind)}.{name}"
    for name, value in ask_etcd(ref, all_of).items():
        shown = UNSET if value is None else value
        if key is None:
            typer.echo(f"{name} {shown}")
        elif name == key:
            typer.echo(shown)
    return 0


def config_set(ref: ClusterRef, key: str, value: str) -> int:
    """Store one setting; workers that watch follow at once. Raises ConfigError for a bad one."""
    kind, name = find(key)

    async def change(etcd: EtcdClient, namespace: str) -> object:
        return await store(etcd, namespace, key, value)

    new = ask_etcd(ref, change)
    typer.echo(f"{root_of(kind)}.{name} = {UNSET if new is None else new}")
    return 0


def recheck(ref: ClusterRef) -> int:
    """Remove all failed self-checks. Connected workers compare again at once."""
    if cleared := ask_etcd(ref, self_checks.clear):
        typer.echo(f"forgot {len(cleared)} failed self-check(s); the workers compare again now")
    else:
        typer.echo("no self-check has failed: nothing to do")
    return 0
