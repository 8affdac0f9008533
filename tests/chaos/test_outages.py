"""Servers and prefill workers that are away: which process tells it, and how long prompts wait.

The engines are mocks. Each prefill worker reaches NATS through a proxy of its own, and all reach
the decode worker through one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.js import JetStreamContext

from pullfill.config import ClusterRef
from pullfill.deploy import status
from pullfill.queue.contract import Urgency
from pullfill.queue.streams import consumer_of
from pullfill.snapshot import NOT_CLAIMED
from tests.support import web
from tests.support.cluster import MOCK, Cluster, Worker, until
from tests.support.etcd import EtcdServer
from tests.support.nats import NatsServer
from tests.support.prompts import ask, random_prompt
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.engine, pytest.mark.slow]

USUAL: dict[str, object] = {
    "policy": "always_remote",
    "remote_timeout_s": 30,
    "claim_timeout_s": 10,
}
NEVER_S = 60.0
"""Longest wait of a test before it fails."""


@dataclass
class Wires:
    cluster: Cluster
    pulls: tuple[Proxy, Proxy]
    asked: int = 0

    @property
    def decode(self) -> Worker:
        (worker,) = self.cluster.of("decode")
        return worker

    def ask(self) -> tuple[float, dict[str, Any]]:
        """Send a new prompt. Returns the seconds until its answer, and its record."""
        self.asked += 1
        begin = time.monotonic()
        answer = ask(self.cluster, random_prompt(700, seed=30_000 + self.asked), 2, logprobs=None)
        return time.monotonic() - begin, self.cluster.explain(answer.request_id)

    def ready(self) -> dict[str, Any]:
        body: dict[str, Any] = web.get(f"{self.cluster.frontend_url}/ready").json()
        return body

    def whole(self) -> bool:
        """Nothing is degraded, and every figure is there."""
        return not self.ready()["degraded"] and self.cluster.status()["queue"] is not None

    def up(self, server: str) -> list[float]:
        """`pullfill_up` of each process that says it, the frontend's own included."""
        found = self.cluster.samples("pullfill_up")
        return [value for key, value in found.items() if ("server", server) in key]

    def printed(self, capsys: pytest.CaptureFixture[str]) -> str:
        """What `pullfill status` prints, by the state directory."""
        cluster = self.cluster
        entries = {"nats_url": cluster.nats.url, "etcd_url": cluster.etcd.url, "processes": []}
        entries |= {"namespace": cluster.namespace, "frontend_url": cluster.frontend_url}
        (cluster.directory / "cluster.json").write_bytes(msgspec.json.encode(entries))
        capsys.readouterr()
        ref = ClusterRef.resolve(state_dir=cluster.directory)
        assert status.status(ref, None, as_json=False) == 0
        return capsys.readouterr().out

    def pulling(self) -> int:
        count: int = self.cluster.load_of(self.decode)["prefill_workers_pulling"]
        return count


@pytest.fixture(scope="module")
def wired(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wires]:
    directory = tmp_path_factory.mktemp("outages")
    with Proxy() as first, Proxy() as second, Cluster(directory, model_path) as cluster:
        cluster.start_servers()
        first.target = second.target = ("127.0.0.1", cluster.nats.port)
        cluster.launch("decode", *MOCK)
        for proxy in (first, second):
            cluster.launch("prefill", *MOCK, nats=f"nats://{proxy.address}")
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        yield Wires(cluster, (first, second))


@pytest.fixture
def wires(wired: Wires) -> Iterator[Wires]:
    wired.cluster.set_router(**USUAL)
    until(lambda: wired.pulling() == 2 and wired.whole(), NEVER_S, "all is well")
    yield wired
    for proxy in wired.pulls:
        proxy.pass_all()
    until(lambda: wired.pulling() == 2 and wired.whole(), NEVER_S, "all is well again")
    wired.cluster.assert_clean()


@pytest.mark.essential
def test_row_15_a_prefill_worker_cut_off_from_nats_does_not_count(wires: Wires) -> None:
    """The other one gets all prompts; without any, prompts are local at once and say why."""
    first, second = wires.pulls
    first.blackhole()
    until(lambda: wires.pulling() == 1, NEVER_S, "one says so")
    told = [wires.ask()[1] for _ in range(5)]
    assert {t["path"] for t in told} == {"remote"}
    assert len({t["prefill_instance"] for t in told}) == 1
    second.blackhole()
    until(lambda: wires.pulling() == 0, NEVER_S, "both say so")
    for _ in range(3):
        _, trace = wires.ask()
        assert (trace["path"], trace["reason"]) == ("local", "no_prefill_worker")
        assert trace["fallback"] is None, "nothing was queued, so nothing waited"
        assert "pulls no jobs: NATS does not answer it" in trace["outage"]


def deliveries(cluster: Cluster, *, paused: bool) -> None:
    """While they are paused, JetStream answers pulls and stores jobs, and delivers none."""

    async def order(context: JetStreamContext, jobs: str) -> None:
        for urgency in Urgency:
            if paused:
                told = await context.pause_consumer(
                    jobs, consumer_of(urgency), "2999-01-01T00:00:00Z"
                )
            else:
                told = await context.resume_consumer(jobs, consumer_of(urgency))
            assert told.paused is paused

    cluster.jetstream(order)


@pytest.mark.essential
def test_row_28_claims_that_time_out_stop_the_queueing(wires: Wires) -> None:
    """All workers are connected and pull, but no job arrives anywhere. Only the first three prompts
    wait for the claim timeout. After that one prompt at a time is a trial, and waits far less."""
    wires.cluster.set_router(claim_timeout_s=3)

    deliveries(wires.cluster, paused=True)
    try:
        paid = [wires.ask() for _ in range(3)]
        assert [trace["fallback"] for _, trace in paid] == ["claim_timeout"] * 3
        line = f"{wires.decode.instance_id}: {NOT_CLAIMED}"
        until(lambda: wires.ask() and line in wires.ready()["reasons"], NEVER_S, "/ready says it")
        later = [wires.ask() for _ in range(20)]
    finally:
        deliveries(wires.cluster, paused=False)
    least = min(seconds for seconds, _ in paid)
    # A busy machine may stop a process for as long, once.
    assert sum(seconds > 0.7 * least for seconds, _ in later) <= 1
    stalled = [trace for _, trace in later if trace["reason"] == "claims_stalled"]
    trials = [trace for _, trace in later if trace["fallback"]]
    assert len(stalled) + len(trials) == len(later)
    assert len(trials) < len(stalled)
    assert all(NOT_CLAIMED in trace["outage"] for _, trace in later)
    until(lambda: wires.ask()[1]["path"] == "remote", NEVER_S, "a trial is claimed")
    assert [wires.ask()[1]["path"] for _ in range(3)] == ["remote"] * 3


def told_of(wires: Wires, server: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every interface tells that it is unreachable, and for how long. That time grows."""
    line = f"{name} unreachable for "

    def named() -> bool:
        """One process notices before another: until all agree, the process is named with it."""
        body = wires.ready()
        assert body["ready"] is True, "prompts are served all the same"
        lines = [r for r in body["reasons"] if r.startswith(line) and "127.0.0.1:" in r]
        return bool(body["degraded"] and lines)

    until(named, NEVER_S, "/ready names the server")
    first = wires.cluster.status()["servers"][server]
    assert (first["up"], "127.0.0.1:" in first["error"]) == (False, True)
    until(lambda: set(wires.up(server)) == {0.0}, NEVER_S, "every process says it in its metrics")
    later = wires.cluster.status()
    assert later["servers"][server]["since_s"] > first["since_s"]
    other = "etcd" if server == "nats" else "nats"
    assert later["servers"][other]["up"] is True
    assert set(wires.up(other)) == {1.0}
    assert line in wires.printed(capsys)


@contextmanager
def away(server: NatsServer | EtcdServer, how: str) -> Iterator[None]:
    getattr(server, how)()
    try:
        yield
    finally:
        getattr(server, {"kill": "start", "pause": "resume"}[how])()


def healed(wires: Wires, server: str, name: str) -> None:
    until(lambda: wires.whole(), NEVER_S, "nothing is degraded")
    assert wires.cluster.status()["servers"][server]["error"] is None
    assert not any(name in reason for reason in wires.ready()["reasons"])
    until(lambda: set(wires.up(server)) == {1.0}, NEVER_S, "up in all metrics")


@pytest.mark.parametrize("how", ["pause", pytest.param("kill", marks=pytest.mark.long)])
@pytest.mark.essential
def test_row_14_nats_that_is_away_is_told(
    how: str, wires: Wires, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed, or stopped with its connections open. No figure of the queue is repeated."""
    known = wires.cluster.status()["queue"]
    assert known["age_s"] < NEVER_S
    with away(wires.cluster.nats, how):
        told_of(wires, "nats", "NATS", capsys)
        assert wires.cluster.status()["queue"] is None
        assert "queue: unknown" in wires.printed(capsys)
        depth = wires.cluster.samples("pullfill_queue_depth_jobs")
        of_decode = [v for k, v in depth.items() if ("role", "decode") in k]
        assert of_decode
        assert all(value != value for value in of_decode), "not a number"
        _, trace = wires.ask()
        assert (trace["path"], trace["reason"]) == ("local", "queue_unavailable")
        assert trace["outage"].startswith("NATS unreachable for ")
    healed(wires, "nats", "NATS")
    until(lambda: wires.ask()[1]["path"] == "remote", NEVER_S, "remote again")


@pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=pytest.mark.long)])
@pytest.mark.essential
def test_row_17_etcd_that_is_away_is_told(
    how: str, wires: Wires, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list of workers is an old picture then: its age is said. `pullfill status` asks the
    frontend of the state directory and needs no etcd."""
    with away(wires.cluster.etcd, how):
        told_of(wires, "etcd", "etcd", capsys)
        state = wires.cluster.status()
        assert state["workers_age_s"] >= state["servers"]["etcd"]["since_s"]
        assert len(state["workers"]) == 3, "as last known"
        assert re.search(r"the list of workers is \d+ s old", wires.printed(capsys))
        _, trace = wires.ask()
        assert trace["path"] == "remote" or "etcd unreachable" in trace["outage"], (
            "only a prefill worker that met the decode worker before needs no etcd"
        )
    healed(wires, "etcd", "etcd")
