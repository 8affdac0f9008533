"""Stops the recorded processes of a cluster, for `pullfill down` and at the end of `up`.

Workers drain first, because their streams go through the frontends. Then the frontends drain: they
may have streams of stock servers. NATS and etcd stop last. A process that does not end in time gets
a second SIGTERM, which means "stop now", and then SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Annotated

import click

from pullfill.config import ClusterRef, ProcessEntry
from pullfill.deploy.members import etcd_of, workers
from pullfill.deploy.state import Locked, StateDir, is_alive, send, start_time, tagged
from pullfill.deploy.view import ProcessView, SteadyConsole
from pullfill.errors import PullfillError
from pullfill.net.this_host import host_id, shm_dir
from pullfill.options import Flag

WORKERS = ("worker", "decode", "prefill")
SERVERS = ("etcd", "nats")
PHASES: tuple[tuple[str, ...], ...] = (WORKERS, ("frontend",), SERVERS)
# How long a process may take to end after a second SIGTERM, and its kernel after a SIGKILL.
GRACE_S = 3.0


_LONGEST = (
    "How long workers, and then frontends, may finish streams  [default: their --drain-timeout]"
)


async def down(
    state: StateDir,
    timeout_s: Annotated[float | None, Flag(_LONGEST, metavar="S", least=0)] = None,
) -> int:
    """Stop the cluster of a state directory, also when its `up` was killed. Return the exit code.

    timeout_s: as `drain_s` of `take_down`."""
    if not state.path.is_dir():
        click.echo(f"nothing runs from {state.path}")
        return 0
    hurry = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, hurry.set)
    async with _locked(state, timeout_s):
        if (cluster := state.cluster()) is None:
            click.echo(f"nothing runs from {state.path}")
            state.clear()
            return 0
        entries = cluster.processes
        strangers = await _by_hand(state, entries)
        live = [entry for entry in entries if is_alive(entry)]
        view = ProcessView(SteadyConsole())
        killed = await take_down(state, entries, view, drain_s=timeout_s, force=hurry.is_set)
    gone = len(entries) - len(live)
    text = f"stopped {len(live) - len(killed)} of {len(live)} processes in order"
    text += f", killed {', '.join(killed)}" if killed else ""
    text += f"; {gone} had ended before" if gone else ""
    click.echo(text)
    for name, pid in strangers:
        click.echo(
            f"{name} (pid {pid}) was started by hand and still runs: stop it with kill {pid}"
        )
    return 0 if not state.live() else 1


@asynccontextmanager
async def _locked(state: StateDir, timeout_s: float | None) -> AsyncIterator[None]:
    """Hold the lock of the directory. Raises Locked if it is not free in time."""
    # An `up` that is still starting is told to stop, and undoes its start itself. One that is
    # stopping already is waited for.
    began = time.monotonic()
    told = False
    with ExitStack() as held:
        while True:
            state.refuse_foreign()
            try:
                held.enter_context(state.locked())
                state.refuse_foreign()  # it may have been written meanwhile
                break
            except Locked:
                waited, cluster = time.monotonic() - began, state.readable()
                processes = cluster.processes if cluster else []
                if waited > 2 * (_drain_s(processes, timeout_s) + 3 * GRACE_S):
                    raise
            # A supervisor that restarts a process holds the lock for less than half a second.
            if cluster and not told and waited > 0.5 and not state.stopping():
                up = cluster.supervisor
                click.echo(f"stopping the `pullfill up` that is starting (pid {up.pid})")
                told = send(up, signal.SIGTERM)
            await asyncio.sleep(0.1)
        yield


async def _by_hand(state: StateDir, entries: Sequence[ProcessEntry]) -> list[tuple[str, int]]:
    """Return id and pid of the workers on this machine that `up` has not started."""
    ours = {entry.pid for entry in entries}
    try:
        ref = ClusterRef.resolve(state_dir=state.path)
        async with etcd_of(ref, wait_s=0.5) as etcd:
            records = await workers(etcd, ref.namespace)
    except PullfillError:
        return []
    here = [r for r in records if r.host_id == host_id() and r.pid not in ours]
    return [(r.instance_id, r.pid) for r in here if start_time(r.pid) is not None]


async def take_down(
    state: StateDir,
    entries: Sequence[ProcessEntry],
    view: ProcessView,
    *,
    drain_s: float | None,
    force: Callable[[], bool],
) -> list[str]:
    """Stop all processes of this state directory and remove its record.

    Return the names of those that had to be killed. The caller holds the lock of `state`, so
    nothing is restarted meanwhile.

    drain_s: how long workers may drain, and then frontends. None: as long as each was told when it
        was started.
    force: asked often. True: do not wait for the deadlines."""
    # The supervisor sees the mark, and leaves the other processes to this function.
    state.mark_stopping()
    cluster = state.readable()
    other = cluster.supervisor if cluster and cluster.supervisor.pid != os.getpid() else None
    if other is not None:
        send(other, signal.SIGTERM)
    killed = await stop_in_order(entries, view, drain_s, force)
    if cluster is not None:
        await _kill_stragglers(cluster.cluster_id)
    gone = [entry for entry in entries if not is_alive(entry)]
    # The shared-memory files that the dead left.
    for instance in filter(None, (entry.instance_id for entry in gone)):
        for file in shm_dir().glob(f"pullfill-{instance}*"):
            with suppress(OSError):
                file.unlink()
    if len(gone) == len(entries):
        state.clear()
    deadline = time.monotonic() + 2 * GRACE_S
    while other is not None and is_alive(other):
        if time.monotonic() > deadline:
            send(other, signal.SIGKILL)
            break
        await asyncio.sleep(0.05)
    return killed


async def stop_in_order(
    entries: Sequence[ProcessEntry],
    view: ProcessView,
    drain_s: float | None,
    force: Callable[[], bool],
) -> list[str]:
    """Stop the processes: workers, then frontends, then servers.

    Return the names of those that had to be killed. For `drain_s` and `force` see `take_down`."""
    killed: list[str] = []
    for roles in PHASES:
        phase = [e for e in entries if e.role in roles and is_alive(e)]
        # Servers have nothing to drain.
        deadline_s = _drain_s(phase, None if roles is SERVERS else drain_s)
        killed += await stop_phase(phase, view, deadline_s, force)
    return killed


def _drain_s(entries: Sequence[ProcessEntry], given: float | None) -> float:
    """Return how long these may drain together. given: as `drain_s` of `take_down`."""
    if given is not None:
        return given
    return max((entry.drain_s for entry in entries), default=0.0)


async def stop_phase(
    phase: Sequence[ProcessEntry],
    view: ProcessView,
    deadline_s: float,
    force: Callable[[], bool],
) -> list[str]:
    """Stop these processes: SIGTERM, after `deadline_s` or with `force` once more, then SIGKILL.

    Return the names of those that had to be killed."""
    alive = {entry.name: entry for entry in phase}
    for entry in phase:
        view.set(entry.name, "draining" if entry.role in WORKERS else "stopping")
    for sig, within_s, hurry in (
        (signal.SIGTERM, deadline_s, force),
        (signal.SIGTERM, GRACE_S, lambda: False),
        (signal.SIGKILL, 3 * GRACE_S, lambda: False),
    ):
        how = "killed" if sig is signal.SIGKILL else "stopped"
        killed = list(alive)  # in the last round
        for entry in alive.values():
            send(entry, sig)
        end = time.monotonic() + within_s
        while alive and time.monotonic() < end and not hurry():
            await asyncio.sleep(0.05)
            for name in [name for name, entry in alive.items() if not is_alive(entry)]:
                view.set(name, how)
                del alive[name]
    # Unkillable: stuck in the kernel. Say so instead of hanging.
    for name in alive:
        view.set(name, "failed", "does not die; see its pid in the log directory")
    return killed


async def _kill_stragglers(cluster_id: str) -> None:
    """Kill all processes of this cluster that still run, and wait."""
    # They are found by the cluster's id in their environment. `up` may have started one without
    # recording it, or a worker that was killed may have left one.
    killed = [process for process in tagged(cluster_id) if send(process, signal.SIGKILL)]
    deadline = time.monotonic() + GRACE_S
    while any(map(is_alive, killed)) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.05)
