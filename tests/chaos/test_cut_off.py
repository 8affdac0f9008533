"""Workers that live and cannot reach each other: a TCP proxy is on their way.

KV itself goes through shared memory here and is never cut: what is tested is that nobody waits for
ever, that the loser of a cut writes nothing late, and that all is well when the cable is back.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.checked import Bound, checked
from tests.support.cluster import Cluster, until
from tests.support.etcd import free_ports
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def wired(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Proxy]]:
    """A cluster, and the way from its prefill worker to its decode worker."""
    (port,) = free_ports(1)
    with (
        Proxy(("127.0.0.1", port)) as control,
        Cluster(tmp_path_factory.mktemp("cut"), model_path) as cluster,
    ):
        advertised = f"--advertise-control=tcp://{control.address}"
        cluster.start(("decode", f"--control-port={port}", advertised), "prefill", "frontend")
        yield cluster, control


@pytest.mark.parametrize(
    ("timeout_s", "cause"), [(4, "timeout"), (30, "prefill_lost")], ids=["deadline", "silence"]
)
@pytest.mark.essential
def test_row_18_blackhole(
    timeout_s: float, cause: str, wired: tuple[Cluster, Proxy], oracle: Oracle
) -> None:
    """The deadline, or five seconds without a sign of life, and then local. What was said into the
    hole arrives when it is over, and is refused. So is the claim of a prefill worker that gave the
    silent connection up first, handed the job back and pulled it again."""
    cluster, control = wired
    (prefill,) = cluster.of("prefill")
    cluster.set_router(policy="always_remote", remote_timeout_s=timeout_s)
    late: dict[str, Bound] = dict.fromkeys(("revoked", "commit", "write", "claim"), (0, 1))
    with checked(cluster, oracle, fallbacks={cause: 1}, stale=late) as check:
        prefill.arm("prefill.before_write=stop@1")
        with ThreadPoolExecutor(1) as pool:
            # A longer prompt may get a longer deadline on a busy machine: twice what is expected.
            answer = pool.submit(check.ask, random_prompt(300, seed=int(20_000 + timeout_s)))
            until(lambda: prefill.stopped, 10, "stopped before a write")
            control.blackhole()
            prefill.signal(signal.SIGCONT)
            answer.result(60)
        control.pass_all()
    until(cluster.linked, 20, "connected again")
    cluster.assert_clean()
