"""Waiting until a frontend knows the blocks that a request has left at a decode worker."""

from __future__ import annotations

import time
from typing import Any

from tests.support.cluster import Cluster, until

_STILL_S = 0.25
"""A worker sends its events within 0.05 s. After so long without new ones it has sent all."""


class BlocksOf:
    """The blocks at each decode worker. Make one before a request, and call `wait` after it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before = {name: row["load"]["prefix"]["events"] for name, row in self._rows().items()}

    def wait(self, instance_id: str) -> None:
        """Wait until the frontend knows all blocks of this worker, and some of them are new."""
        seen, since = self._before[instance_id], time.monotonic()

        def known() -> bool:
            nonlocal seen, since
            if (row := self._rows().get(instance_id)) is None:
                return False
            own, theirs = row["load"]["prefix"], row["routing"]["prefix"]
            if own["events"] != seen:
                seen, since = own["events"], time.monotonic()
            still = seen > self._before[instance_id] and time.monotonic() - since > _STILL_S
            return still and theirs["state"] == "warm" and theirs["blocks"] == own["blocks"]

        until(known, 20.0, "the frontend knows the blocks")

    def _rows(self) -> dict[str, dict[str, Any]]:
        """The status of each decode worker that answers. A killed one is still listed, empty."""
        rows = self._cluster.rows().values()
        return {row["instance_id"]: row for row in rows if row["role"] == "decode" and row["load"]}
