"""Waits until processes of `up` can work: workers and frontends are ready when etcd says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from pullfill.config import ClusterRef
from pullfill.deploy import members, plan
from pullfill.deploy.children import Children, StartFailed
from pullfill.deploy.procs import confine
from pullfill.errors import RegistryUnavailable
from pullfill.options import UpOptions
from pullfill.registry.client import EtcdClient
from pullfill.wire import WorkerState

POLL_S = 0.1
ETCD_AWAY_S = 30.0
"""How long etcd may not answer meanwhile. Longer than the supervisor takes to start it again."""


async def wait_ready(
    options: UpOptions, children: Children, ref: ClusterRef, specs: Sequence[plan.ProcessSpec]
) -> None:
    """Wait until all are ready. Start workers that had to wait for another on their GPU.

    The caller holds the lock of the state directory if one has to wait. Raises StartFailed, and
    RegistryUnavailable if etcd does not answer for ETCD_AWAY_S."""
    waiting = {spec.name: spec for spec in specs}
    answered = time.monotonic()
    deadline = answered + options.ready_timeout_s
    async with members.etcd_of(ref, wait_s=ETCD_AWAY_S) as etcd:
        while waiting:
            try:
                ready = await _ready(etcd, ref.namespace)
                answered = time.monotonic()
            except RegistryUnavailable:
                if time.monotonic() - answered > ETCD_AWAY_S:
                    raise
                ready = {}
            for name, spec in list(waiting.items()):
                if spec.after in waiting:
                    continue
                if name not in children.names:
                    children.launch(spec)
                    deadline = time.monotonic() + options.ready_timeout_s
                children.raise_if_dead(name)
                url = ready.get(str(spec.instance_id))
                if url is None:
                    continue
                # Stock vLLM servers may come later, by heartbeats for example.
                if (
                    spec.role != "frontend"
                    or not options.decode
                    or await asyncio.to_thread(members.frontend_ready, url)
                ):
                    children.view.set(name, "ready", spec.url)
                    del waiting[name]
            if waiting and time.monotonic() > deadline:
                name = next(iter(waiting))
                why = f"was not ready after {options.ready_timeout_s:.0f} s"
                raise StartFailed(children.describe(name, why))
            await asyncio.sleep(2 * POLL_S)


async def _ready(etcd: EtcdClient, namespace: str) -> dict[str, str]:
    """Return the own URL of each member that is registered as ready, by instance id."""
    found = await members.workers(etcd, namespace)
    return {r.instance_id: r.http for r in found if r.state is WorkerState.READY}


def keep_frontends_off(options: UpOptions, children: Children, names: Sequence[str]) -> None:
    """Keep those of these processes that are frontends off the cores of prefill workers."""
    if cores := plan.other_cores(options):
        for name in names:
            if children.entry(name).role == "frontend":
                confine(children[name].pid, cores)
