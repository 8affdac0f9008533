"""Why a prefill worker pulls no jobs, and who is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pullfill.prefill_worker.pulling import Pulling
from pullfill.runtime.health import Health


def test_other_work_pauses_the_pulling_and_decode_workers_know() -> None:
    told: list[Any] = []
    connections: Any = SimpleNamespace(pause=lambda why: told.append(why))
    puller: Any = SimpleNamespace(pause=told.append, changed=lambda: told.append("changed"))
    health = Health("nats", "nats://h:1")
    health.ok()
    pulling = Pulling(connections, puller, health)
    pulling.yields("its own streams leave no time")
    pulling.yields("its own streams leave no time")
    assert told == [True, "its own streams leave no time"], "told once"
    told.clear()
    pulling.engine_stuck(True)
    pulling.yields("")
    assert told == [True, "its engine takes no steps", True], "still paused"
    pulling.engine_stuck(False)
    pulling.close()
    health.failed("closed")
    assert told[-3:] == [False, "changed", ""]
