"""What the decode worker's request server makes of vLLM's statistics: they leave with outputs,
added up.

Here and not beside the other tests of the request server, because all is about the fields of vLLM's
own structs, whose import takes five seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from pullfill.engine import requests
from tests.support.request_server_rig import Rig, rigged


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rigged(monkeypatch) as rig:
        yield rig


def stats(running: int = 0, asked: int = 0, more: Any = None) -> Any:
    made = SchedulerStats(num_running_reqs=running, kv_connector_stats=more)
    made.prefix_cache_stats.requests = asked
    return made


def step(stats: Any, output: bool = False) -> dict[int, Any]:
    outputs = [EngineCoreOutput("r", [7])] if output else []
    return {0: EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)}


@pytest.fixture
def sent(rig: Rig) -> list[Any]:
    """What is encoded for the frontend."""
    sent: list[Any] = []
    rig.request_server._codec.encode = lambda batch: sent.append(batch) or [b""]  # type: ignore[assignment]
    rig.request_server.check_silent()
    return sent


def test_statistics_of_several_steps_leave_with_one_output(rig: Rig, sent: list[Any]) -> None:
    rig.request_server.send_outputs(step(stats(1, asked=2)))
    rig.request_server.send_outputs(step(stats(2), output=True))
    assert [(s.scheduler_stats, len(s.outputs)) for s in sent] == [(None, 1)], "sent too early"
    rig.clock.advance(0.3)
    rig.request_server.send_outputs(step(stats(3, asked=5), output=True))
    [last] = sent[1:]
    levels, counts = last.scheduler_stats, last.scheduler_stats.prefix_cache_stats
    assert (levels.num_running_reqs, counts.requests) == (3, 7), "levels are replaced, counts not"
    rig.clock.advance(0.3)
    rig.request_server.send_outputs(step(stats(4), output=True))
    assert sent[2].scheduler_stats is None, "they wait anew"


def test_statistics_without_an_output_leave_after_a_second(rig: Rig, sent: list[Any]) -> None:
    rig.request_server.send_outputs(step(stats(1)))
    rig.clock.advance(0.9)
    rig.request_server.check_silent()
    assert sent == []
    rig.clock.advance(0.2)
    rig.request_server.check_silent()
    assert [s.scheduler_stats.num_running_reqs for s in sent] == [1]


def test_statistics_of_the_last_step_leave_with_the_last_output(rig: Rig, sent: list[Any]) -> None:
    """The gauges showed a request for a second more. After an abort there is no output."""
    first, rig.peer = rig.peer, zmq.Context.instance().socket(zmq.DEALER)
    rig.peer.connect(rig.request_server.address)
    rig.hello()
    first.close(0)
    sent.clear()

    def told() -> list[tuple[int, int | None]]:
        found = [(len(s.outputs), s.scheduler_stats) for s in sent]
        sent.clear()
        return [(n, None if s is None else s.num_running_reqs) for n, s in found]

    rig.request_server.send_outputs(step(stats(1), output=True))
    rig.clock.advance(0.3)
    rig.request_server.send_outputs(step(stats(1), output=True))
    rig.request_server.send_outputs(step(stats(0), output=True))
    assert told() == [(1, None), (1, 1), (0, 0), (1, 0)], "both frontends are told"
    for _ in range(2):
        rig.request_server.send_outputs(step(stats(0)))
    rig.clock.advance(0.3)
    rig.request_server.send_outputs(step(stats(1), output=True))
    rig.request_server.send_outputs(step(stats(0)))
    rig.request_server.send_outputs(step(stats(0)))
    assert told() == [(1, 1), (0, 0), (0, 0)], "once for each frontend, when that changes"


def test_statistics_that_do_not_add_up_leave_with_each_output(rig: Rig, sent: list[Any]) -> None:
    odd = {"x": 1}
    rig.request_server.send_outputs(step(stats(1, asked=1)))
    rig.request_server.send_outputs(step(stats(2, more=odd)))
    rig.clock.advance(0.3)
    rig.request_server.send_outputs(step(stats(3, more=odd), output=True))
    found = [(s.scheduler_stats, len(s.outputs)) for s in sent]
    assert [(s.num_running_reqs, s.prefix_cache_stats.requests, n) for s, n in found] == [
        (2, 1, 0),
        (3, 0, 1),
    ]
    for made in (stats(4, more=odd), stats(5), stats(6)):
        rig.request_server.send_outputs(step(made, output=True))
    told = [s.scheduler_stats and s.scheduler_stats.num_running_reqs for s in sent[2:]]
    assert told == [4, 5, None], "as long as there are such"


def test_prefix_cache_counts_of_two_steps_add_up() -> None:
    """Each field of vLLM's."""
    older, newer = stats(1), stats(2)
    names = [f.name for f in fields(PrefixCacheStats)]
    counts = [name for name in names if name not in ("reset", "hits_by_source")]
    by_source: dict[str, Any] = {"hits_by_source": {"a": 1}} if "hits_by_source" in names else {}
    for made in (older, newer):
        made.connector_prefix_cache_stats = PrefixCacheStats(**copy.deepcopy(by_source))
        for hits in (made.prefix_cache_stats, made.connector_prefix_cache_stats):
            for number, name in enumerate(counts, 1):
                setattr(hits, name, number)
    requests.add_up_stats(newer, older)
    for hits in (newer.prefix_cache_stats, newer.connector_prefix_cache_stats):
        assert hits is not None
        assert [getattr(hits, name) for name in counts] == [
            2 * n for n in range(1, len(counts) + 1)
        ]
    assert newer.connector_prefix_cache_stats is not None
    if by_source:  # since vLLM 0.32
        assert newer.connector_prefix_cache_stats.hits_by_source == {"a": 2}
    assert newer.num_running_reqs == 2


def test_a_reset_of_the_prefix_cache_does_not_add_up() -> None:
    made = stats(1)
    made.connector_prefix_cache_stats = PrefixCacheStats()
    assert requests.stats_plain(made)
    for hits in (made.prefix_cache_stats, made.connector_prefix_cache_stats):
        hits.reset = True
        assert not requests.stats_plain(made)
        hits.reset = False
