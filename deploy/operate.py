"""Orders to a running cluster: drain one worker, read and change settings."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy.members import Members, http_get
from pullfill.deploy.procs import ProcessId, identify, is_alive
from pullfill.errors import ConfigError, UnavailableError
from pullfill.net.this_host import host_id
from pullfill.registry.orders import LiveWorker, revoke_worker
from pullfill.registry.settings import UNSET, Settings, find, root_of
from pullfill.wire import Message, QueueSettings, RouterConfig

_POLL_S = 0.1


def _print(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


# --------------------------------------------------------------------------- drain


def drain(ref: ClusterRef, instance_id: str, *, wait: bool, timeout_s: float) -> int:
    """Revoke the worker's lease; with `wait` return when its process is gone. 1: still there."""
    return asyncio.run(_drain(ref, instance_id, wait, timeout_s))


async def _drain(ref: ClusterRef, instance_id: str, wait: bool, timeout_s: float) -> int:
    async with Members(ref) as members:
        worker = await members.find(instance_id)
        if worker is None:
            known = ", ".join(w.record.instance_id for w in await members.all()) or "none"
            raise ConfigError(f"no worker {instance_id!r} is registered; there are: {known}")
        # Before the revoke: afterwards the process may be gone and its pid another's.
        process = _local_process(worker)
        if await revoke_worker(members.client, ref.namespace, instance_id) is None:
            _print(f"{instance_id} is already leaving")
    if not wait:
        _print(f"{instance_id} drains: it takes no new work and exits when its work is done")
        return 0
    console = Console()
    began = time.monotonic()
    with console.status(f"{instance_id} drains ..."):
        while await asyncio.to_thread(_still_there, worker, process):
            if time.monotonic() - began > timeout_s:
                _print(
                    f"{instance_id} still drains after {timeout_s:.0f} s: wait longer with "
                    f"--timeout S, or end it with kill {worker.record.pid} on {worker.record.host}"
                )
                return 1
            await asyncio.sleep(_POLL_S)
    _print(f"{instance_id} is gone after {time.monotonic() - began:.1f} s")
    return 0


def _local_process(worker: LiveWorker) -> ProcessId | None:
    return identify(worker.record.pid) if worker.record.host_id == host_id() else None


def _still_there(worker: LiveWorker, process: ProcessId | None) -> bool:
    if process is not None:
        return is_alive(process)
    if not worker.record.http:
        return False
    try:
        http_get(f"{worker.record.http}/live", 2.0)
    except UnavailableError:
        return False
    return True


# --------------------------------------------------------------------------- settings


def config_get(ref: ClusterRef, key: str | None) -> int:
    """Print one setting, or all as `KEY VALUE` lines."""
    if key is not None:
        kind, name = find(key)
        key = f"{root_of(kind)}.{name}"
    values = asyncio.run(_config_get(ref))
    for name, value in values.items():
        shown = UNSET if value is None else value
        if key is None:
            _print(f"{name} {shown}")
        elif name == key:
            _print(str(shown))
    return 0


async def _config_get(ref: ClusterRef) -> dict[str, object]:
    async with Members(ref) as members:
        router = Settings(members.client, ref.namespace, RouterConfig)
        queue = Settings(members.client, ref.namespace, QueueSettings)
        return await router.get_all() | await queue.get_all()


def config_set(ref: ClusterRef, key: str, value: str) -> int:
    """Store one setting; workers that watch follow at once. Raises ConfigError for a bad one."""
    kind, name = find(key)
    new = asyncio.run(_config_set(ref, kind, name, value))
    _print(f"{root_of(kind)}.{name} = {UNSET if new is None else new}")
    return 0


async def _config_set(ref: ClusterRef, kind: type[Message], name: str, value: str) -> object:
    async with Members(ref) as members:
        settings = Settings(members.client, ref.namespace, kind)
        return getattr(await settings.set(name, value), name)
