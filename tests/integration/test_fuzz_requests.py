"""Any request over HTTP: it is answered, or refused with a reason, and ends no process.

What this found and what was repaired for it: tests/integration/test_odd_requests.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings

from tests.support.cluster import Cluster
from tests.support.fuzz import MANY
from tests.support.fuzz_requests import REQUEST
from tests.support.odd import send, unharmed, wrong_with
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("policy", ["always_local", "always_remote"])
@pytest.mark.essential
def test_fuzz_no_request_ends_an_engine_and_each_gets_an_answer(
    cluster: Cluster, oracle: Oracle, policy: str
) -> None:
    cluster.set_router(policy=policy)
    chosen = settings(
        max_examples=MANY // 2 or 40,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    reached = Counter[bool]()
    workers = [worker for worker in cluster.workers if worker.alive]

    def prop(request: tuple[str, dict[str, Any]]) -> None:
        answer = send(cluster, *request)
        served = answer.status_code == 200 and '"error"' not in answer.text
        event(f"{request[0]}: {'served' if served else 'refused'}")
        reached[served] += 1
        wrong = wrong_with(answer)
        assert not wrong, f"{wrong}: {answer.text[:500]}"
        assert all(worker.alive for worker in workers), "a process died"

    with unharmed(cluster, oracle):
        chosen(given(request=REQUEST)(prop))()
    share = reached[True] / reached.total()
    print(f"{policy}: {reached.total()} requests, {share:.0%} served, the others refused")
    assert 0.4 < share < 0.98, "most requests reach an engine, and some are refused"
