"""How urgent a job is, and how long it may wait, by what its request says."""

from __future__ import annotations

from types import SimpleNamespace

from pullfill.queue.contract import Urgency
from pullfill.wire import MAX_TEXT
from tests.support.handoff_model import BLOCK
from tests.unit.decode_worker.test_connector_scheduler import Rig


def test_a_job_is_as_urgent_as_its_request() -> None:
    rig = Rig()
    for ttft_ms in (100, None, 60_000):
        params = SimpleNamespace(extra_args={"ttft_ms": ttft_ms} if ttft_ms else None)
        rig.send(2 * BLOCK, name=f"r{ttft_ms}", sampling_params=params)
    rig.side.step_done()
    assert [job.urgency for job in rig.published] == list(Urgency)


def test_salt_and_priority_go_with_the_job() -> None:
    rig = Rig()
    rig.send(20, cache_salt="s" * MAX_TEXT, priority=-3)
    assert (rig.published[0].cache_salt, rig.published[0].priority) == ("s" * MAX_TEXT, -3)
