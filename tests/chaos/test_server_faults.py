"""etcd or NATS stopped or killed: serving goes on, and everything heals."""

from __future__ import annotations

import pytest

from tests.support.checked import MANY, Bound, checked
from tests.support.cluster import Cluster, until
from tests.support.oracle import Oracle

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOID: dict[str, Bound] = {"claim": (0, MANY), "commit": (0, 3), "revoked": (0, 3), "write": (1, 3)}
"""Grants of an old incarnation end in one of these; load has two of them open, and the one that is
held is refused at its write."""
LOST: dict[str, Bound] = {"prefill_lost": (1, 4)}
"""Both workers register again, one after the other. Each time both clients may lose a job."""
WRITE = "prefill.before_write"


@pytest.mark.essential
def test_row_14_nats_killed_and_restarted(paired: Cluster, oracle: Oracle) -> None:
    """Local at once: what was published falls back at its deadline at the latest, what was not
    costs one failed publish. No job is lost or done twice after."""
    failed: dict[str, Bound] = {"publish_failed": (0, 2), "timeout": (0, 2), "prefill_lost": (0, 2)}
    with checked(paired, oracle, fallbacks=failed, stale={"claim": (0, 4)}) as check:
        with check.load(threads=2, seed=9400) as load:
            load.more(4)
            paired.nats.kill()
            load.more(7)
            paired.nats.start()


@pytest.mark.essential
def test_row_15_nats_hangs(paired: Cluster, oracle: Oracle) -> None:
    """One publish per client finds out, or a PING before it; then nothing is published."""
    failed: dict[str, Bound] = {"publish_failed": (0, 2), "timeout": (0, 2), "prefill_lost": (0, 2)}
    with checked(paired, oracle, fallbacks=failed, stale={"claim": (0, 4)}) as check:
        with check.load(threads=2, seed=9600) as load:
            load.more(4)
            paired.nats.pause()
            load.more(7)
            paired.nats.resume()


@pytest.mark.essential
def test_row_17_etcd_killed_and_back_empty(paired: Cluster, oracle: Oracle) -> None:
    (writer,) = paired.of("prefill")
    with checked(paired, oracle, fallbacks=LOST, stale=VOID) as check:
        before = paired.incarnations()
        with check.load(threads=2, seed=9200) as load:
            load.more(4)
            writer.hold(WRITE)
            paired.etcd.restart(empty=True)
            until(lambda: len(paired.incarnations()) == 2, 30, "registered again")
            writer.arm("")
        assert not paired.incarnations() & before
