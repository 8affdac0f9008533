"""Workers that live and cannot reach each other, or the queue: a TCP proxy on each of their ways.

KV itself goes through shared memory here and is never cut: what is tested is that nobody waits for
ever, that the loser of a cut writes nothing late, and that all is well when the cable is back.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.checked import Bound, Checked, checked
from tests.support.cluster import Cluster, Worker, until
from tests.support.etcd import free_ports
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@dataclass
class Wires:
    """control: prefill to decode worker; pulls, publishes: of either to NATS."""

    cluster: Cluster
    control: Proxy
    pulls: Proxy
    publishes: Proxy

    @property
    def prefill(self) -> Worker:
        (worker,) = self.cluster.of("prefill")
        return worker

    @property
    def proxies(self) -> tuple[Proxy, ...]:
        return self.control, self.pulls, self.publishes


@pytest.fixture(scope="module")
def wired(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wires]:
    cluster = Cluster(tmp_path_factory.mktemp("cut"), model_path)
    with Proxy() as control, Proxy() as pulls, Proxy() as publishes:
        try:
            cluster.start_servers()
            (port,) = free_ports(1)
            control.target = ("127.0.0.1", port)
            pulls.target = publishes.target = ("127.0.0.1", cluster.nats.port)
            cluster.launch(
                "decode",
                f"--control-port={port}",
                f"--advertise-control=tcp://{control.address}",
                nats=f"nats://{publishes.address}",
            )
            cluster.launch("prefill", nats=f"nats://{pulls.address}")
            cluster.launch("frontend")
            cluster.wait_ready(*cluster.workers)
            yield Wires(cluster, control, pulls, publishes)
        finally:
            cluster.stop()


@pytest.fixture
def wires(wired: Wires) -> Iterator[Wires]:
    wired.cluster.set_router(policy="always_remote", remote_timeout_s=30)
    yield wired
    for proxy in wired.proxies:
        proxy.pass_all()
    wired.prefill.arm("")
    until(lambda: wired.cluster.linked(), 20, "connected again")
    wired.cluster.assert_clean()


def cut_in_a_handoff(
    wires: Wires, check: Checked, cut: Callable[[], None], seed: int
) -> dict[str, Any]:
    """Send a request, and call `cut` while its prefill worker is stopped before its first write.
    Returns the request's record."""
    wires.prefill.arm("prefill.before_write=stop@1")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(check.ask, random_prompt(900, seed=seed))
        until(lambda: wires.prefill.stopped, 10, "stopped before a write")
        cut()
        wires.prefill.signal(signal.SIGCONT)
        return check.told(answer.result(60))


@pytest.mark.parametrize(
    ("timeout_s", "cause"), [(4, "timeout"), (30, "prefill_lost")], ids=["deadline", "silence"]
)
@pytest.mark.essential
def test_row_18_blackhole(timeout_s: float, cause: str, wires: Wires, oracle: Oracle) -> None:
    """The deadline, or five seconds without a sign of life, and then local. What was said into the
    hole arrives when it is over, and is refused. So is the claim of a prefill worker that gave the
    silent connection up first, handed the job back and pulled it again."""
    late: dict[str, Bound] = dict.fromkeys(("revoked", "commit", "write", "claim"), (0, 1))
    with checked(wires.cluster, oracle, fallbacks={cause: 1}, stale=late) as check:
        wires.cluster.set_router(remote_timeout_s=timeout_s)
        cut_in_a_handoff(wires, check, wires.control.blackhole, seed=int(20_000 + timeout_s))
        wires.control.pass_all()


@pytest.mark.long
def test_row_18_half_open(wires: Wires, oracle: Oracle) -> None:
    """The prefill worker comes back over a new connection while the old one seems to stand: its
    new claim takes the job from its old self."""
    late: dict[str, Bound] = {"write": (0, 1), "claim": (0, 1)}
    with checked(wires.cluster, oracle, stale=late) as check:
        told = cut_in_a_handoff(wires, check, wires.control.half_open, seed=20_200)
        assert (told["path"], told["attempts"]) == ("remote", 2)


@pytest.mark.long
def test_row_15_decode_worker_cut_off_from_nats(wires: Wires, oracle: Oracle) -> None:
    """At most one publish fails. After that prompts are local at once."""
    with checked(
        wires.cluster, oracle, fallbacks={"publish_failed": (0, 1)}, stale={"claim": (0, 1)}
    ) as check:
        wires.publishes.blackhole()
        for seed in (1, 2, 3):
            check.ask(random_prompt(700, seed=20_500 + seed))
        wires.publishes.pass_all()
