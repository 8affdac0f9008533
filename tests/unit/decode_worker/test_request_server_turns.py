"""What the decode worker's request server does in one turn of its loop, and what it sends in one
message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest

from pullfill.decode_worker import request_server
from pullfill.decode_worker.request_server import Frontend
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.engine import front_wire
from tests.support.fake_vllm import STOP, Output, Outputs
from tests.support.request_server_rig import Rig, rigged


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rigged(monkeypatch) as rig:
        yield rig


def test_one_small_message_of_a_turn_is_prepared_at_once(rig: Rig) -> None:
    """Two wake-ups of threads cost more than it does. All others keep their order behind it."""
    for name in ("a", "b"):
        rig.peer.send_multipart((front_wire.ADD, name.encode(), bytes(40), b""))
    go = rig.hold_intake()
    intake = rig.request_server.intake
    while intake._given - intake._taken < 3:  # what holds it, and both messages
        assert rig.request_server._socket.poll(5000)
        rig.request_server.receive()
    assert rig.core.prepared == [], "something waits before them"
    go.set()
    rig.settle()
    assert rig.core.added == ["a", "b"]
    rig.add("c", settle=False)
    assert rig.core.prepared == ["a", "b", "c"]
    assert not rig.todo.empty(), "the engine takes it in with its next step"
    rig.settle()
    assert rig.core.added == ["a", "b", "c"]


def test_a_large_message_is_never_prepared_on_the_engine_thread(rig: Rig) -> None:
    thread: list[str] = []
    rig.core.preprocess_add_request = MethodType(  # type: ignore[method-assign]
        lambda _, request: (thread.append(threading.current_thread().name) or request, 0), rig.core
    )
    rig.request_server._max_model_len = 1 << 20
    rig.add("small", 100)
    rig.add("large", 10_000)
    rig.request_server.host.stepping = True
    rig.add("at work", 2_000)
    assert thread == ["MainThread", "intake", "intake"]


def test_the_end_of_a_request_brings_its_trace_in_the_same_message(rig: Rig) -> None:
    situation = Situation(10, 0)
    rig.request_server._traces.decided("r", situation, Decision(False, "short"))
    end = Output("r", [7], finish_reason=STOP)
    rig.request_server.send_outputs({0: Outputs(outputs=[end])})
    assert rig.peer.poll(5000)
    kind, trace, _ = rig.peer.recv_multipart()
    assert kind == front_wire.LAST
    [record] = front_wire.decode_explain(trace)
    assert (record.request_id, record.reason) == ("r", "short")
    assert not rig.peer.poll(50)


@dataclass
class Stats:
    """Some fields of vLLM's SchedulerStats."""

    num_running_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: Any = None
    kv_connector_stats: Any = None
    perf_stats: Any = None


@pytest.mark.parametrize("idle", [True, False])
def test_every_frontend_hears_the_last_levels_and_one_the_counts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    server, sent = rig.request_server, list[tuple[int, Any]]()
    monkeypatch.setattr(request_server.requests, "stats_outputs", lambda stats: stats)
    monkeypatch.setattr(request_server.requests, "only_stats", lambda batch: not batch.outputs)
    monkeypatch.setattr(
        server, "_send_out", lambda frontend, stats: sent.append((frontend.index, stats))
    )
    second = Frontend(b"second", 1, rig.clock.monotonic())
    server._frontends[b"second"] = server._by_index[1] = second
    server.check_silent()
    stats = Stats(2, 0.5, "counts", "counts", "counts")
    if idle:
        server.send_outputs({0: Outputs(scheduler_stats=stats)})
    else:  # they leave with the last output of the first frontend
        monkeypatch.setattr(server._stats, "due", lambda _: bool(server._stats._held))
        server.send_outputs({0: Outputs(outputs=[Output("r", [7])], scheduler_stats=stats)})
    for _ in range(2):
        rig.clock.advance(1.1)
        server.check_silent()
    assert sent == [(0, stats)] * idle + [(1, Stats(2, 0.5))]
