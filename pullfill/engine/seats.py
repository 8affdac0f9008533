"""Keeps a seat in vLLM's scheduler for each request whose KV is on its way (`--reserve-seats`).

vLLM counts only requests that run against `--max-num-seqs`. So more KV may arrive than requests can
run, and it fills blocks while it waits. Here a request takes its seat when its KV is asked for:

    running + arriving <= --max-num-seqs

Other requests wait without blocks, and without a job. No step ever waits for KV: requests that run
go on, and those whose KV has arrived come before all that wait. What vLLM's KV offloading alone
loads is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pullfill.engine import release


class Seats:
    """See the module. Engine thread.

    core: vLLM's EngineCore. None: no seat is kept for anybody."""

    # vLLM reads its limit anew for each request that it admits, so a change counts at once.

    def __init__(self, core: Any = None) -> None:
        self._scheduler = core.scheduler if core is not None else None
        self._limit = release.this.seats
        self._most = getattr(self._scheduler, self._limit) if self._scheduler is not None else 0
        self._taken: set[str] = set()

    def take(self, request_id: str) -> None:
        """Keep a seat for a request whose KV is on its way."""
        self._taken.add(request_id)
        self._tell()

    def leave(self, request_ids: Iterable[str]) -> None:
        """Keep no seats for these any more: they run next, or have ended. Harmless if repeated."""
        if not self._taken.isdisjoint(request_ids := list(request_ids)):
            self._taken.difference_update(request_ids)
            self._tell()

    def _tell(self) -> None:
        if self._scheduler is not None:
            setattr(self._scheduler, self._limit, self._most - len(self._taken))
