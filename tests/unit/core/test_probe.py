"""The probe server of a worker, and the metric names others build on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from pullfill.errors import ConfigError
from pullfill.runtime.probe import ProbeServer

PROMISED = {
    "pullfill_decision_total": ("path", "reason"),
    "pullfill_queue_depth_jobs": (),
    "pullfill_queue_depth_tokens": (),
    "pullfill_queue_oldest_age_seconds": (),
    "pullfill_handoff_stage_seconds": ("stage",),
    "pullfill_claim_total": ("result",),
    "pullfill_kv_write_bytes_total": ("transport",),
    "pullfill_kv_write_seconds": ("transport",),
    "pullfill_quarantined_blocks": (),
    "pullfill_stale_refused_total": ("what",),
    "pullfill_fallback_total": ("cause",),
    "pullfill_dead_letter_total": (),
    "pullfill_self_check_total": ("result",),
}


class Worker:
    ready = True
    refreshed = 0

    def is_ready(self) -> tuple[bool, dict[str, Any]]:
        return self.ready, {"degraded": False}

    def refresh(self) -> None:
        self.refreshed += 1


@pytest.fixture
async def worker() -> AsyncIterator[tuple[Worker, ProbeServer]]:
    it = Worker()
    server = ProbeServer(
        "127.0.0.1", it.is_ready, lambda: {"state": "ready"}, it.refresh, lambda: {"jobs": [1]}
    )
    await server.start()
    yield it, server
    await server.stop()


async def _get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


async def test_routes(worker: tuple[Worker, ProbeServer]) -> None:
    it, server = worker
    assert server.url.startswith("http://127.0.0.1:")
    assert (await _get(f"{server.url}/live"))[0] == 200
    assert await _get(f"{server.url}/ready") == (200, '{"ready": true, "degraded": false}')
    it.ready = False
    assert (await _get(f"{server.url}/ready"))[0] == 503
    assert await _get(f"{server.url}/status") == (200, '{"state": "ready"}')
    assert (await _get(f"{server.url}/nothing"))[0] == 404


@pytest.mark.essential
def test_promised_metrics_and_labels() -> None:
    families = {}
    for collector in list(REGISTRY._collector_to_names):
        name = getattr(collector, "_name", "")
        if name.startswith("pullfill_"):
            kind = getattr(collector, "_type", "")
            families[name + ("_total" if kind == "counter" else "")] = tuple(
                getattr(collector, "_labelnames", ())
            )
    for name, labels in PROMISED.items():
        assert families.get(name) == labels, name


async def test_the_port_asked_for(worker: tuple[Worker, ProbeServer]) -> None:
    it, first = worker
    taken = int(first.url.rpartition(":")[2])
    second = ProbeServer("127.0.0.1", it.is_ready, dict)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken} .*--http-port"):
        await second.start(taken)
    await first.stop()
    await second.start(taken)
    assert second.url == f"http://127.0.0.1:{taken}"
    await second.stop()
