"""What the decode worker's shim does in one turn of its loop, and what it sends in one message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from pullfill.decode_worker.router import Decision, Situation
from pullfill.engine import outputs, rpc
from tests.support.late import Late
from tests.support.shim_rig import Rig, replace_codecs

vllm_engine: Any = Late("vllm.v1.engine")
vllm_stats: Any = Late("vllm.v1.metrics.stats")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    replace_codecs(monkeypatch)
    rig = Rig()
    yield rig
    rig.close()


def test_one_small_message_of_a_turn_is_prepared_at_once(rig: Rig) -> None:
    """Two wake-ups of threads cost more than it does. All others keep their order behind it."""
    for name in ("a", "b"):
        rig.peer.send_multipart((rpc.ADD, name.encode(), bytes(40), b""))
    go = rig.hold_intake()
    assert rig.shim._socket.poll(5000)
    rig.shim.receive()
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
    rig.core.preprocess_add_request = lambda request: (  # type: ignore[method-assign]
        thread.append(threading.current_thread().name) or request,
        0,
    )
    rig.shim._max_model_len = 1 << 20
    rig.add("small", 100)
    rig.add("large", 10_000)
    rig.shim.host.stepping = True
    rig.add("at work", 2_000)
    assert thread == ["MainThread", "intake", "intake"]


# ------------------------------------------------------------------ statistics without outputs


def stats(running: int = 0, asked: int = 0, more: Any = None) -> Any:
    made = vllm_stats.SchedulerStats(num_running_reqs=running, kv_connector_stats=more)
    made.prefix_cache_stats.requests = asked
    return made


def step(stats: Any, output: bool = False) -> dict[int, Any]:
    outputs = [vllm_engine.EngineCoreOutput("r", [7])] if output else []
    return {0: vllm_engine.EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)}


@pytest.fixture
def sent(rig: Rig) -> list[Any]:
    """What is encoded for the frontend."""
    sent: list[Any] = []
    rig.shim._codec.encode = lambda batch: sent.append(batch) or [b""]  # type: ignore[assignment]
    rig.shim.check_silent()
    return sent


def test_statistics_of_several_steps_leave_with_one_output(rig: Rig, sent: list[Any]) -> None:
    rig.shim.send_outputs(step(stats(1, asked=2)))
    rig.shim.send_outputs(step(stats(2), output=True))
    assert [(s.scheduler_stats, len(s.outputs)) for s in sent] == [(None, 1)], "sent too early"
    rig.clock.advance(0.3)
    rig.shim.send_outputs(step(stats(3, asked=5), output=True))
    [last] = sent[1:]
    levels, counts = last.scheduler_stats, last.scheduler_stats.prefix_cache_stats
    assert (levels.num_running_reqs, counts.requests) == (3, 7), "levels are replaced, counts not"
    rig.clock.advance(0.3)
    rig.shim.send_outputs(step(stats(4), output=True))
    assert sent[2].scheduler_stats is None, "they wait anew"


def test_statistics_without_an_output_leave_after_a_second(rig: Rig, sent: list[Any]) -> None:
    rig.shim.send_outputs(step(stats(1)))
    rig.clock.advance(0.9)
    rig.shim.check_silent()
    assert sent == []
    rig.clock.advance(0.2)
    rig.shim.check_silent()
    assert [s.scheduler_stats.num_running_reqs for s in sent] == [1]


def test_statistics_that_do_not_add_up_leave_at_once(rig: Rig, sent: list[Any]) -> None:
    odd = {"x": 1}
    rig.shim.send_outputs(step(stats(1, asked=1)))
    rig.shim.send_outputs(step(stats(2, more=odd)))
    rig.shim.send_outputs(step(stats(3, more=odd), output=True))
    found = [(s.scheduler_stats, len(s.outputs)) for s in sent]
    assert [(s.num_running_reqs, s.prefix_cache_stats.requests, n) for s, n in found] == [
        (2, 1, 0),
        (3, 0, 1),
    ]


def test_prefix_cache_counts_of_two_steps_add_up() -> None:
    """Each field of vLLM's."""
    older, newer = stats(1), stats(2)
    counts = [f.name for f in fields(vllm_stats.PrefixCacheStats)]
    counts = [name for name in counts if name not in ("reset", "hits_by_source")]
    for made in (older, newer):
        made.connector_prefix_cache_stats = vllm_stats.PrefixCacheStats(hits_by_source={"a": 1})
        for hits in (made.prefix_cache_stats, made.connector_prefix_cache_stats):
            for number, name in enumerate(counts, 1):
                setattr(hits, name, number)
    outputs.add_up(newer, older)
    for hits in (newer.prefix_cache_stats, newer.connector_prefix_cache_stats):
        assert hits is not None
        assert [getattr(hits, name) for name in counts] == [
            2 * n for n in range(1, len(counts) + 1)
        ]
    assert newer.connector_prefix_cache_stats is not None
    assert newer.connector_prefix_cache_stats.hits_by_source == {"a": 2}
    assert newer.num_running_reqs == 2


def test_a_reset_of_the_prefix_cache_does_not_add_up() -> None:
    made = stats(1)
    made.connector_prefix_cache_stats = vllm_stats.PrefixCacheStats()
    assert outputs.plain(made)
    for hits in (made.prefix_cache_stats, made.connector_prefix_cache_stats):
        hits.reset = True
        assert not outputs.plain(made)
        hits.reset = False


def test_the_end_of_a_request_brings_its_story_in_the_same_message(rig: Rig) -> None:
    situation = Situation(10, 0, "")
    rig.shim._stories.decided("r", situation, Decision(False, "short"))
    end = vllm_engine.EngineCoreOutput("r", [7], finish_reason=vllm_engine.FinishReason.STOP)
    rig.shim.send_outputs({0: vllm_engine.EngineCoreOutputs(outputs=[end])})
    assert rig.peer.poll(5000)
    kind, story, _ = rig.peer.recv_multipart()
    assert kind == rpc.LAST
    [record] = rpc.decode_explain(story)
    assert (record.request_id, record.reason) == ("r", "short")
    assert not rig.peer.poll(50)
