"""The KV memory of a decode worker on this machine, as anybody can see it: its shared file."""

from __future__ import annotations

import hashlib

from pullfill.transfer.shm.files import PREFIX, shm_dir
from tests.support.cluster import Worker


def kv_digest(worker: Worker) -> str:
    """Over every byte. Two equal ones around an event: it wrote nothing (an idle engine's memory
    does not change)."""
    with (shm_dir() / f"{PREFIX}{worker.instance_id}-0.kv").open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
