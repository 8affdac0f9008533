"""The control benchmark's own arithmetic: whose CPU it is, what a token costs, what a row says."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import machine, report
from benchmarks.control import groups, idle, links, plant, probes, scale, tokens
from benchmarks.control.driver import Sticky
from benchmarks.control.plant import Use, mock_flags
from pullfill.decode_worker import connector_scheduler as decode
from pullfill.prefill_worker import scheduler as prefill
from pullfill.testing.mock_model import settings_of
from pullfill.wire import DecodePolicy


class Clock:
    """A thread's CPU clock that moves only when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0
        patch.setattr(probes, "_clock", lambda: self.now)

    def work(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_our_part_of_an_engine_step_is_not_the_engines(clock: Clock) -> None:
    counters = probes.Counters()
    request = SimpleNamespace(request_id="r")

    class Side:
        def decide(self, request: Any, hit: int) -> None:
            clock.work(30)

        def enqueue(self, request: Any, blocks: Any, external: int) -> None:
            clock.work(5)

    decide = counters.side("decide", Side.decide)
    enqueue = counters.side("enqueue", Side.enqueue)

    def step() -> None:
        clock.work(100)
        decide(Side(), request, 0)
        decide(Side(), request, 0)  # asked again
        clock.work(10)
        enqueue(Side(), request, (), 7)

    counters.engine(step, counts=True)()
    assert (counters.engine_ns, counters.side_ns, counters.steps) == (110, 65, 1)
    assert counters.decisions_ns == [35], "the last time it was asked, and the opening"


def test_a_local_prefill_is_no_decision_to_time(clock: Clock) -> None:
    counters = probes.Counters()
    request = SimpleNamespace(request_id="r")
    counters.side("decide", lambda *_: clock.work(30))(None, request, 0)
    counters.side("enqueue", lambda *_: clock.work(5))(None, request, (), 0)
    assert counters.decisions_ns == []


@pytest.mark.parametrize(
    ("scheduler", "calls"),
    [
        (decode.ConnectorScheduler, probes.DECODE_CALLS),
        (prefill.PrefillScheduler, probes.PREFILL_CALLS),
    ],
)
def test_what_is_timed_exists(scheduler: Any, calls: tuple[str, ...]) -> None:
    assert [name for name in calls if not hasattr(scheduler, name)] == []


def test_threads_are_told_by_name() -> None:
    time.sleep(0.001)
    used = probes._threads()
    assert used["loop"] > 0, "the main thread"


def test_a_token_is_the_slope_and_a_request_what_is_left() -> None:
    found = {
        count: [{"frontend": 2.0 + 0.03 * count, "workers": 3.0 + 0.05 * count, "engines": 1.0}]
        for count in (tokens.SHORT, tokens.LONG)
    }
    rows = {row.metric: row for row in tokens._rows(found)}
    request = rows["CPU per request, frontend and both workers"]
    token = rows["CPU per streamed token, frontend and both workers"]
    assert request.value == pytest.approx(5.0, rel=1e-3)
    assert token.value == pytest.approx(80.0, rel=1e-3)
    assert (request.peer_value, token.peer_value) == (2.5, 16.0)
    assert rows["CPU per streamed token, engines"].value == pytest.approx(0.0, abs=1e-6)


def size(remote: int = 40, cpu: float = 0.01, failed: int = 0) -> scale.Size:
    use = {role: Use(total=cpu, engine=0.004 if role == "decode" else 0.0) for role in scale.ROLES}
    return scale.Size(
        workers=2, ready_s=1.0, floor_ms=0.9, idle=dict.fromkeys(scale.ROLES, 0.006),
        stages={"queue": [1.0, 2.0, 3.0]}, paced=use, paced_requests=10, use=use, requests=10,
        full=use, full_requests=20, loop_s=0.5, remote=remote, failed=failed, rss_mb=100.0,
    )  # fmt: skip


def test_engines_do_not_count_and_all_must_be_remote() -> None:
    rows = {row.metric.removeprefix("2+2 workers: "): row for row in scale.rows_of(size())}
    assert rows["CPU per request beside engines"].value == pytest.approx(4.6)
    assert not rows["CPU per request beside engines"].ok
    assert rows["queue p50"].value == 2.0
    assert rows["requests prefilled remotely"].ok
    rows = {row.metric.removeprefix("2+2 workers: "): row for row in scale.rows_of(size(39, 0.003))}
    assert not rows["requests prefilled remotely"].ok
    assert rows["CPU per request beside engines"].ok
    rows = {row.metric.removeprefix("2+2 workers: "): row for row in scale.rows_of(size(failed=1))}
    assert not rows["requests failed"].ok


def test_the_low_rate_is_held_against_messages_alone_without_what_idling_costs() -> None:
    rows = {row.metric.removeprefix("2+2 workers: "): row for row in scale.rows_of(size())}
    assert rows["the same with as many requests for each worker"].value == pytest.approx(2.3)
    assert rows["the same at 30 requests/s"].value == pytest.approx(4.6)
    assert rows["of it idling"].value == pytest.approx(1.0)  # 5 times 0.6 % of a core, at 30/s
    rest = rows["the rest at 30 requests/s"]
    assert (rest.value, rest.ratio, rest.ok) == (pytest.approx(3.6), pytest.approx(4.0), False)


def test_a_conversation_stays_at_its_worker() -> None:
    workers = [SimpleNamespace(instance_id=name) for name in ("b", "a", "c")]

    def chosen(prompt: list[int], among: list[SimpleNamespace]) -> SimpleNamespace:
        flight: Any = SimpleNamespace(request=SimpleNamespace(prompt_token_ids=prompt))
        worker = Sticky(lambda: DecodePolicy.RANDOM).choose(flight, among, 0.0)
        assert isinstance(worker, SimpleNamespace)
        return worker

    assert chosen([7, 9], workers[::-1]) is chosen([7, 1, 2], workers)
    assert {chosen([n], workers).instance_id for n in range(3)} == {"a", "b", "c"}


def test_mock_flags_are_what_the_backend_reads() -> None:
    kv, config = mock_flags(1 << 20, step_s=0.01)
    assert kv == "--kv-cache-memory-bytes=1048576"

    assert settings_of(json.loads(config.partition("=")[2])).step_s == 0.01


def test_what_a_worker_keeps_is_counted() -> None:
    before, gate = idle.kept_by([os.getpid()]), threading.Event()
    with socket.socket(), socket.socket():
        waiting = threading.Thread(target=gate.wait)
        waiting.start()
        after = idle.kept_by([os.getpid()])
        gate.set()
        waiting.join()
    assert (after.threads - before.threads, after.sockets - before.sockets) == (1, 2)
    assert after.private_mb > 0
    rows = idle.rows_of("2+2 idle workers", "decode", idle.Kept(8, 6, 3.0), 2)
    assert [float(row.value) for row in rows] == [4, 3, 1.5]


def test_an_idle_fleet_is_seen_after_use_and_after_its_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this process in place of workers."""
    happened: list[Any] = []

    class Alone:
        decode = prefill = [os.getpid()]  # noqa: RUF012

        def __init__(self, *_: Any, **__: Any) -> None:
            self.driver = SimpleNamespace(do=lambda what, **args: happened.append(args))

        @contextmanager
        def window(self) -> Iterator[dict[str, Use]]:
            used = {name: Use() for name in ("decode", "prefill", "nats", "etcd")}
            yield used
            used["decode"].total, used["prefill"].total, used["etcd"].total = 0.02, 0.01, 0.04

        def close(self) -> None:
            happened.append("closed")

    monkeypatch.setattr(idle, "Fleet", Alone)
    monkeypatch.setattr(idle.time, "sleep", happened.append)
    options: Any = SimpleNamespace(meet=3, rest=75.0, idle=4.0)
    servers: Any = SimpleNamespace(servers=[])
    rows = {
        row.metric: float(row.value) for row in idle.run(servers, 1, options, machine.OtherLoad())
    }
    assert [happened[0]["conversations"], *happened[1:]] == [3, 75.0, 4.0, "closed"]
    assert len(rows) == 18
    assert rows["1+1 idle workers: wake-ups of one decode worker"] >= 0
    assert rows["1+1 idle workers: CPU of one decode worker"] == 0.5
    assert rows["1+1 idle workers: CPU of etcd, per pair of workers"] == 1.0
    assert rows["1+1 workers just used: threads of one prefill worker"] >= 1


def test_workers_of_a_fleet_start_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once would starve etcd, and workers would lose their leases. So a group starts when
    the one before it is registered."""
    at_once: list[int] = []

    class Slow:
        base = Path("/nowhere")
        forked = known = 0

        def fork(self, role: str, namespace: str, **_: Any) -> int:
            self.forked += role != "driver"
            at_once.append(self.forked - self.known)
            return self.forked

        def registered(self, namespace: str) -> int:
            self.known += self.forked > self.known  # one each time it is asked
            if self.known == 3:
                raise OSError("etcd is busy")
            return self.known

    driver = SimpleNamespace(do=lambda what, **args: None)
    monkeypatch.setattr(plant, "Driver", lambda path: driver)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    slow: Any = Slow()
    fleet = plant.Fleet(slow, "ns", 30, 10, decode_flags=[], prefill_flags=[], router={})
    assert fleet.decode + fleet.prefill == list(range(1, 41))
    assert slow.known == 40
    assert max(at_once) == plant.AT_ONCE


async def test_the_control_links_of_an_idle_fleet_are_counted() -> None:
    kept = await links.keep(3, 0.0, 0.05)
    assert (kept.connections, kept.fewest) == (9, 3)
    assert kept.sockets >= 3 + 2 * 9
    assert kept.tasks >= 9 * 3
    rows = {row.metric.partition(": ")[2]: row for row in links.rows_of(3, kept)}
    assert rows["connections for each pair of workers"].value == 3
    assert rows["fewest of one decode worker"].ok
    assert not links.rows_of(3, replace(kept, fewest=2))[1].ok
    assert not links.rows_of(3, replace(kept, connections=3 * 37))[0].ok


def test_a_fleet_that_does_not_fit_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "Fleet", None)
    free = idle.free_bytes()
    assert free > 0
    many = free // idle.EACH_BYTES
    options: Any = SimpleNamespace()
    (row,) = idle.run(SimpleNamespace(), many, options, machine.OtherLoad())  # type: ignore[arg-type]
    assert row.value is None
    assert "GB of memory" in row.unit
    monkeypatch.setattr(idle, "free_bytes", lambda: 10**18)
    monkeypatch.setattr(idle.os, "cpu_count", lambda: 2)
    used = {"one decode worker": 0.4, "one prefill worker": 0.3, "etcd, per pair of workers": 0.2}
    smaller = [report.row(f"64+64 idle workers: CPU of {of}", n, "%") for of, n in used.items()]
    assert idle.why_not(128, smaller) == ""
    assert idle.why_not(256, smaller) == "idle, they need 2.3 cores, 2 are there"


def _config(flags: list[str]) -> Any:
    """Return what vLLM makes of --additional-config."""
    return next(json.loads(f.partition("=")[2]) for f in flags if f.startswith("--additional"))


def test_models_of_four_groups_have_the_same_kv_and_their_ratio_is_the_rounds() -> None:
    flags = groups.flags()
    settings = {name: settings_of(_config(own)) for name, own in flags.items()}
    assert {(s.layers, s.kv_heads, s.head_size) for s in settings.values()} == {(4, 1, 8)}
    assert {name: s.windows for name, s in settings.items()} == {
        groups.ONE: 0, groups.FOUR: 3, groups.FOUR_OF_16: 3
    }  # fmt: skip
    values = {groups.ONE: [1.0, 4.0, 2.0], groups.FOUR: [1.1, 4.0, 2.1]}
    found = {figure: {**values, groups.FOUR_OF_16: [2.0, 8.0, 4.0]} for figure in groups.UNITS}
    rows = groups.rows_of(found)
    assert [(r.ratio, r.ok, bool(r.target)) for r in rows[::2]] == [(1.05, True, True)] * 3 + [
        (2.0, True, False)
    ] * 3
    assert [r.value for r in rows[1::2]] == [0.05] * 3 + [0.0] * 3


def test_the_interval_of_a_median_narrows_with_more_values_and_ignores_outliers() -> None:
    assert groups.interval_of([1.0]) == 0
    assert groups.interval_of([1.0, 1.2]) == pytest.approx(0.1)
    rng = random.Random(0)
    few, many = ([rng.gauss(1.0, 0.05) for _ in range(n)] for n in (20, 500))
    assert 0.01 < groups.interval_of(few) < 0.04
    assert groups.interval_of([*many, 90.0]) < 0.01


def test_each_round_of_groups_loads_every_model_twice_with_new_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[tuple[str, int]] = []

    def fleet(_: Any, name: str, *__: Any, **___: Any) -> Any:
        return SimpleNamespace(name=name, front=1, decode=[2], prefill=[3], close=lambda: None)

    def window(fleet: Any, seed: int) -> Any:
        loads.append((fleet.name, seed))
        slow = 1.0 + len(loads)  # the machine gets slower and slower
        return dict.fromkeys(groups.UNITS, slow), {"failed": 0, "requests": 2, "remote": 2}

    ours: set[tuple[int, ...]] = set()

    def quiet(pids: list[int]) -> Any:  # the real one reads all of /proc
        ours.add(tuple(pids))
        return nullcontext()

    monkeypatch.setattr(groups, "Fleet", fleet)
    monkeypatch.setattr(groups, "_window", window)
    plant: Any = SimpleNamespace(servers=[4])
    load: Any = SimpleNamespace(window=quiet)
    rows = groups.run(plant, 2, load)
    assert ours == {(1, 2, 3, 1, 2, 3, 1, 2, 3, 4)}
    assert len(loads) == len(set(loads)) == (2 * groups.MORE_ROUNDS + 1) * 6
    assert [row.value for row in rows[:2]] == [0, 0]
    assert {row.ratio for row in rows[2::2]} == {1.0}
