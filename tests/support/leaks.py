"""What connections could leave behind in this process, and requests in a cluster."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any


def usage() -> tuple[int, int, int]:
    """Descriptors, mappings of regions, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("pullfill-")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


def grown(before: tuple[int, int, int]) -> list[str]:
    """What there is more of than in `before`. Less is no leak: threads may end late."""
    kinds = ("descriptors", "mappings", "threads")
    now = zip(kinds, before, usage(), strict=True)
    return [f"{kind}: {was} before, {is_now} now" for kind, was, is_now in now if is_now > was]


def left_in(status: dict[str, Any], living: Collection[int] = ()) -> list[str]:
    """What is not as in a cluster without requests. status: as of `/pullfill/status`.

    living: pids of workers that live. One of them that does not answer may hold anything."""
    if status["queue"] is None:
        return ["the queue is unknown"]
    found = []
    for key in ("depth_jobs", "in_flight", "depth_tokens"):
        if status["queue"][key]:
            found.append(f"queue {key}={status['queue'][key]}")
    for worker in status["workers"]:
        if worker["state"] == "lost":
            if worker["pid"] in living:
                found.append(f"{worker['instance_id']} does not answer")
            continue
        name, load = worker["instance_id"], worker["load"]
        for key in (
            "open_jobs",
            "quarantined_blocks",
            "read_leases",
            "requests",
            "jobs",
            "running",
        ):
            if load.get(key):
                found.append(f"{name} {key}={load[key]}")
        if role_blocks := load.get("kv_blocks"):
            free = load["kv_free_blocks"]
            if free != role_blocks:
                found.append(f"{name} free blocks {free} of {role_blocks}")
    return found
