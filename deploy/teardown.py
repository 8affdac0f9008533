"""Stopping exactly the recorded processes, in the order that loses nothing.

Workers drain first (their streams still flow through the frontends), then frontends, then the
servers they all used. After a phase's deadline: a second SIGTERM ("stop now"), then SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence

from pullfill.config import ProcessEntry
from pullfill.deploy.procs import ProcessId, is_alive, send, tagged
from pullfill.deploy.state import StateDir, identity
from pullfill.deploy.view import ProcessView
from pullfill.net.this_host import shm_dir

WORKERS = ("decode", "prefill")
SERVERS = ("etcd", "nats")
PHASES: tuple[tuple[str, ...], ...] = (WORKERS, ("frontend",), SERVERS)
SECOND_TERM_GRACE_S = 3.0
SERVER_DEADLINE_S = 10.0
SUPERVISOR_DEADLINE_S = 5.0
_POLL_S = 0.05


async def stop_cluster(
    entries: Sequence[ProcessEntry],
    view: ProcessView,
    *,
    drain_s: float,
    force: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Stop `entries` phase by phase; returns the names that had to be killed.

    drain_s: how long workers may drain. force: asked often; True skips the waiting.
    """
    killed: list[str] = []
    for roles in PHASES:
        phase = [e for e in entries if e.role in roles and is_alive(identity(e))]
        deadline = drain_s if roles is WORKERS else min(drain_s, SERVER_DEADLINE_S)
        killed += await _stop_phase(phase, view, deadline, force)
    return killed


async def _stop_phase(
    phase: Sequence[ProcessEntry],
    view: ProcessView,
    deadline_s: float,
    force: Callable[[], bool],
) -> list[str]:
    alive = {entry.name: entry for entry in phase}
    for entry in phase:
        view.set(entry.name, "draining" if entry.role in WORKERS else "stopping")
        send(identity(entry), signal.SIGTERM)
    began = time.monotonic()
    second: float | None = None
    killed: list[str] = []
    while True:
        for name, entry in list(alive.items()):
            if not is_alive(identity(entry)):
                view.set(name, "killed" if name in killed else "stopped")
                del alive[name]
        if not alive:
            return killed
        now = time.monotonic()
        if second is None and (now - began > deadline_s or force()):
            second = now
            for entry in alive.values():
                send(identity(entry), signal.SIGTERM)
        elif second is not None and not killed and now - second > SECOND_TERM_GRACE_S:
            killed = list(alive)
            for entry in alive.values():
                send(identity(entry), signal.SIGKILL)
        elif killed and second is not None and now - second > 4 * SECOND_TERM_GRACE_S:
            # Unkillable: stuck in the kernel. Say so instead of hanging.
            for name in alive:
                view.set(name, "failed", "does not die; see its pid in the log directory")
            return killed
        await asyncio.sleep(_POLL_S)


def stop_stragglers(cluster_id: str) -> int:
    """SIGKILL what carries the cluster's id and is still here: helpers of a killed worker, or a
    child that `up` had no time to record. Returns how many."""
    return sum(send(process, signal.SIGKILL) for process in tagged(cluster_id))


def remove_shared_memory(instances: Sequence[str]) -> int:
    """Delete the shared-memory files that dead instances left. Returns how many."""
    count = 0
    for instance in instances:
        for file in shm_dir().glob(f"pullfill-{instance}*"):
            try:
                file.unlink()
                count += 1
            except OSError:
                continue
    return count


async def take_down(
    state: StateDir,
    entries: Sequence[ProcessEntry],
    view: ProcessView,
    *,
    drain_s: float,
    force: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Stop all processes of this state directory and remove its record.

    Returns the names of those that had to be killed. The caller holds the lock of `state`, so
    nothing is restarted meanwhile. The supervisor ends first: it sees the mark of `down`, and
    leaves the other processes to this function.
    """
    state.mark_stopping()
    launch = state.launch()
    other = launch is not None and launch.supervisor_pid != os.getpid()
    if launch is not None and other:
        send(launch.supervisor, signal.SIGTERM)
    killed = await stop_cluster(entries, view, drain_s=drain_s, force=force)
    if launch is not None:
        stop_stragglers(launch.cluster_id)
    gone = [e for e in entries if e.instance_id and not is_alive(identity(e))]
    remove_shared_memory([e.instance_id for e in gone if e.instance_id])
    if all(not is_alive(identity(e)) for e in entries):
        state.clear()
    if launch is not None and other:
        await _wait_for_supervisor(launch.supervisor)
    return killed


async def _wait_for_supervisor(supervisor: ProcessId) -> None:
    """Wait for the supervisor, which ends by itself when its children have ended."""
    deadline = time.monotonic() + SUPERVISOR_DEADLINE_S
    while is_alive(supervisor):
        if time.monotonic() > deadline:
            send(supervisor, signal.SIGKILL)
            return
        await asyncio.sleep(_POLL_S)
