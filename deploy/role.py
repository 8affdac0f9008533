"""`pullfill role`: orders an elastic worker to be a decode worker, a prefill worker, or both."""

from __future__ import annotations

import asyncio
import time

import typer
from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy.members import ask_worker, etcd_of, workers
from pullfill.errors import ConfigError, UnavailableError
from pullfill.registry.client import EtcdClient
from pullfill.registry.orders import order_role
from pullfill.snapshot import Report
from pullfill.wire import WorkerRecord, WorkerRole, WorkerState

_POLL_S = 0.1


def change(
    ref: ClusterRef, instance_id: str, wanted: WorkerRole, *, wait_s: float | None, force: bool
) -> int:
    """Order the role. Return the exit code.

    wait_s: return when the worker has the role, or 1 after this time. None: do not wait.
    force: also if the cluster is left without a decode worker."""
    return asyncio.run(_change(ref, instance_id, wanted, wait_s, force))


async def _change(
    ref: ClusterRef, instance_id: str, wanted: WorkerRole, wait_s: float | None, force: bool
) -> int:
    began = time.monotonic()
    async with etcd_of(ref) as etcd:
        await order(etcd, ref.namespace, instance_id, wanted, force=force)
        if wait_s is None:
            typer.echo(f"{instance_id} is ordered to be {wanted}; `pullfill status` shows its role")
            return 0
        with Console().status(f"{instance_id} becomes {wanted} ..."):
            while not await _has(etcd, ref.namespace, instance_id, wanted):
                if time.monotonic() - began > wait_s:
                    typer.echo(
                        f"{instance_id} is not {wanted} after {wait_s:.0f} s, but goes on trying: "
                        "`pullfill status` shows what it does"
                    )
                    return 1
                await asyncio.sleep(_POLL_S)
    typer.echo(f"{instance_id} is {wanted} after {time.monotonic() - began:.1f} s")
    return 0


async def order(
    etcd: EtcdClient, namespace: str, instance_id: str, wanted: WorkerRole, *, force: bool = False
) -> None:
    """Order the role, if the worker can have it. Raises ConfigError, UnavailableError."""
    records = await workers(etcd, namespace)
    if all(record.instance_id != instance_id for record in records):
        others = dict.fromkeys(r.instance_id for r in records if r.role != "frontend")
        there = ", ".join(others) or "none"
        raise ConfigError(f"no worker {instance_id!r} is registered; there are: {there}")
    record = next(record for record in records if record.instance_id == instance_id)
    check(records, record, await asyncio.to_thread(ask_worker, record), wanted, force=force)
    if not await order_role(etcd, namespace, instance_id, wanted):
        raise UnavailableError(f"{instance_id} changes its role at this moment: try again")


def check(
    records: list[WorkerRecord],
    record: WorkerRecord,
    report: Report | None,
    wanted: WorkerRole,
    *,
    force: bool,
) -> None:
    """Refuse an order that cannot be followed, or that leaves nobody to decode.

    records: of all workers. record, report: of the worker. report: None: it does not answer.
    Raises ConfigError, UnavailableError."""
    name = record.instance_id
    if report is None:
        raise UnavailableError(f"{name} does not answer at {record.http or 'any address'}")
    if "elastic" not in report.load:
        raise ConfigError(
            f"{name} cannot change its role: start it with --elastic (`pullfill up --elastic`)"
        )
    others = [r for r in records if r.role == "decode" and r.instance_id != name]
    if wanted is WorkerRole.PREFILL and not force:
        if all(other.state is not WorkerState.READY for other in others):
            raise ConfigError(
                f"{name} is the only decode worker: without it no request is served. Start another "
                "one first, or use --force"
            )


async def _has(etcd: EtcdClient, namespace: str, instance_id: str, wanted: WorkerRole) -> bool:
    """Whether the worker is registered in the role, and in no other."""
    mine = [r for r in await workers(etcd, namespace) if r.instance_id == instance_id]
    ready = {record.role for record in mine if record.state is WorkerState.READY}
    return len(ready) == len(mine) and ready == wanted.names
