"""Waiting until a frontend knows the blocks that a request has left at a decode worker."""

from __future__ import annotations

import time
from typing import Any

from pullfill.decode_worker.kv_events import FLUSH_S
from tests.support.cluster import Cluster, until

_STILL_S = FLUSH_S + 0.2
"""A worker whose last events are so old has sent all of them."""


class BlocksOf:
    """Make it, ask, then `wait` for the decode worker that answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before = {name: row["load"]["prefix"]["events"] for name, row in self._rows().items()}

    def wait(self, instance_id: str) -> None:
        """Until the worker has told of new blocks and of all others, and the frontend knows."""
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
        """Those of decode workers that answer. One that was killed is listed for a while."""
        rows = self._cluster.rows().values()
        return {row["instance_id"]: row for row in rows if row["role"] == "decode" and row["load"]}
