"""The probe server of a worker, and the metric names others build on."""

from __future__ import annotations

import aiohttp
import pytest

from pullfill.errors import ConfigError
from pullfill.runtime import metrics
from pullfill.runtime.probe import ProbeServer
from tests.support.metrics import families

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


async def _get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


async def test_routes() -> None:
    ready = iter((True, False))
    server = ProbeServer(
        "127.0.0.1",
        lambda: (next(ready), {"degraded": False}),
        lambda query: {"state": "ready", **query},
    )
    await server.start()
    assert (await _get(f"{server.url}/live"))[0] == 200
    assert await _get(f"{server.url}/ready") == (200, '{"ready": true, "degraded": false}')
    assert (await _get(f"{server.url}/ready"))[0] == 503
    assert await _get(f"{server.url}/status") == (200, '{"state": "ready"}')
    more = '{"state": "ready", "jobs": "", "request": "a/b"}'
    assert await _get(f"{server.url}/status?jobs&request=a%2Fb") == (200, more)
    page = (await _get(f"{server.url}/metrics"))[1]
    assert "pullfill_claim_total" in page
    assert "_created" not in page, "it would double the number of series"
    taken = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken} .*--http-port"):
        await ProbeServer("127.0.0.1", lambda: (True, {}), dict).start(taken)
    await server.stop()


@pytest.mark.essential
def test_promised_metrics_and_labels() -> None:
    found = families(metrics)
    for name, labels in PROMISED.items():
        assert found.get(name) == labels, name
