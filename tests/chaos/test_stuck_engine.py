"""Engines that take no step any more, in workers that are alive otherwise.

The worker says so and takes nothing; it goes on if the engine does, and leaves if it does not.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support import web
from tests.support.checked import checked
from tests.support.cluster import Cluster, Worker, until
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.waiting import patience

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STALL_S = 2
SHORTER, LONGER = "engine.step=sleep:3.5@1", "engine.step=sleep:60@1"
"""More than the stall timeout and less than twice that; much more."""


def launch(cluster: Cluster, role: str) -> Worker:
    return cluster.launch(role, "--engine-stall-timeout", str(STALL_S))


def unready(url: str) -> dict[str, Any] | None:
    """What /ready says, None if it is ready."""
    answer = web.get(f"{url}/ready")
    body: dict[str, Any] = answer.json()
    return None if answer.status_code == 200 else body


def state_of(cluster: Cluster, worker: Worker) -> str | None:
    states = {w["instance_id"]: w["state"] for w in cluster.status()["workers"]}
    return states.get(worker.instance_id)


def stall_twice(cluster: Cluster, victim: Worker, load: Load) -> None:
    """Once until it recovers, once for good."""
    url = cluster.records(victim.role)[victim.instance_id].http
    assert unready(url) is None
    victim.arm(SHORTER)
    said = until(lambda: unready(url), 20, "/ready fails")
    assert said["ready"] is False
    assert "the engine is stuck in a step" in said["reason"]
    until(lambda: state_of(cluster, victim) == "draining", 2, "nobody sends it work")
    until(lambda: unready(url) is None, 20, "it is ready again")
    until(lambda: state_of(cluster, victim) == "ready", 5, "it gets work again")
    load.more(4)
    victim.arm(LONGER)
    until(lambda: unready(url), 20, "/ready fails")
    stuck_at = time.monotonic()
    victim.ends(1, 20)
    # What is left of the second timeout, one look, and the way out: not the engine's minute.
    assert time.monotonic() - stuck_at < patience(STALL_S + 6)
    assert "the engine is stuck in a step" in victim.tail(60)
    assert state_of(cluster, victim) in (None, "lost"), "its lease is revoked"
    load.more(4)


@pytest.mark.long
@pytest.mark.essential
def test_stuck_engines(paired: Cluster, oracle: Oracle) -> None:
    """Every request ends well: continued on, or sent to, another worker."""
    prefill, decoder = launch(paired, "prefill"), launch(paired, "decode")
    paired.wait_ready(prefill, decoder)
    with (
        checked(paired, oracle, stale={"claim": (0, 99)}) as check,
        check.load(threads=4, lengths=(200, 700, 1300), max_tokens=12, seed=21_000) as load,
    ):
        until(lambda: decoder.instance_id in load.seen("decode_instance"), 60, "it has work")
        until(lambda: prefill.instance_id in load.seen("prefill_instance"), 60, "it has work")
        stall_twice(paired, prefill, load)
        stall_twice(paired, decoder, load)
