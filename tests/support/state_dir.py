"""What `pullfill up` records in a state directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pullfill.config import ClusterFile, ProcessEntry
from pullfill.deploy.state import StateDir


def entry(name: str = "decode-0", **changes: Any) -> ProcessEntry:
    """A process. Its name begins with its role."""
    role = name.partition("-")[0]
    fields: dict[str, Any] = {
        "name": name, "role": role, "instance_id": f"{role}-1", "pid": 1, "log": "l", "started": 0
    }  # fmt: skip
    return ProcessEntry(**(fields | changes))


def recorded(directory: Path, *entries: ProcessEntry, **changes: Any) -> ClusterFile:
    """Write a record of these processes. changes: of its other fields."""
    urls = {"nats_url": "nats://h:1", "etcd_url": "http://h:2", "frontend_url": "http://h:3"}
    fields: dict[str, Any] = {"namespace": "n", "processes": list(entries), **urls}
    cluster = ClusterFile(**(fields | changes))
    directory.mkdir(exist_ok=True)
    StateDir(directory).write_cluster(cluster)
    return cluster
