"""What is left of a prefix fetch that has failed."""

from __future__ import annotations

from tests.support.fakes import FakeRequest
from tests.unit.decode_worker.test_connector_scheduler import Rig


def test_vllm_reserves_no_blocks_for_a_request_whose_fetch_has_failed() -> None:
    """It would need its blocks twice."""
    rig = Rig()
    request, other = FakeRequest("r", list(range(100))), FakeRequest("s", list(range(100)))
    rig.side.in_flight = {request, other}
    assert rig.side.decide(request, 0)[1]
    assert rig.side.in_flight == {other}
