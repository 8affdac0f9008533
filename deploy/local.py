"""Reads from the state directory which processes `pullfill up` has started on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pullfill.config import ClusterRef
from pullfill.deploy.procs import is_alive
from pullfill.deploy.state import StateDir, identity
from pullfill.errors import ConfigError


def processes(ref: ClusterRef) -> dict[str, Any]:
    """Return `processes` and `supervisor` of `pullfill status --json`. {}: nothing is recorded."""
    if ref.state_dir is None:
        return {}
    state = StateDir(ref.state_dir)
    try:
        cluster = state.cluster()
    except ConfigError:
        return {}
    launch = state.launch()
    if cluster is None or launch is None or cluster.etcd_url != ref.etcd_url:
        return {}
    rows = [
        {
            "name": entry.name,
            "role": entry.role,
            "instance_id": entry.instance_id,
            "pid": entry.pid,
            "alive": is_alive(identity(entry)),
            "restarts": entry.restarts,
            "gave_up": entry.gave_up or None,
        }
        for entry in cluster.processes
    ]
    pid = launch.supervisor_pid
    supervisor = {"pid": pid, "alive": is_alive(launch.supervisor), "restart": launch.restart}
    return {"processes": rows, "supervisor": supervisor}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines for people: what has ended, what was restarted, and whether restarts are on."""
    for row in found.get("processes", ()):
        if row["gave_up"]:
            yield f"{row['name']}: " + row["gave_up"].replace("\n", "\n    ")
        elif not row["alive"]:
            yield f"{row['name']} (pid {row['pid']}) does not run, restarts: {row['restarts']}"
        elif row["restarts"]:
            yield f"{row['name']} (pid {row['pid']}) runs, restarts: {row['restarts']}"
    supervisor = found.get("supervisor", {"alive": True, "restart": True})
    if not supervisor["restart"]:
        yield "processes that die are not started again (--no-restart)"
    elif not supervisor["alive"]:
        yield (
            f"processes that die are not started again: the supervisor (pid {supervisor['pid']}) "
            "is gone. To have one, use `pullfill down`, then `pullfill up`"
        )
