"""The benchmark of a job's messages alone brings every job to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.control import floor
from tests.support.nats import NatsServer


async def test_all_jobs_are_published_claimed_committed_and_acknowledged(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    try:
        # The server is measured from 2.2 s on, so the jobs must not be over by then: 60 take 3 s.
        rows = await asyncio.to_thread(
            floor.run, server.url, server.pid, rounds=1, jobs=60, warm_up=5
        )
    finally:
        server.stop()
    whole, *parts = (float(str(row.value)) for row in rows)
    assert min(parts) > 0.0
    assert sum(parts) == pytest.approx(whole, rel=0.01)
