"""The fleet that the control benchmark measures: all is real but the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.control import plant
from benchmarks.control.plant import mock_flags
from pullfill.demo.checkpoint import ensure_demo_model
from pullfill.deploy import plan as deploy_plan


@pytest.mark.timeout(300)
def test_a_fleet_serves_both_turns_of_a_conversation_at_one_worker(tmp_path: Path) -> None:
    """What `duel` and `make bench-control` start: all is real but the model."""
    ensure_demo_model(deploy_plan.demo_directory())
    with plant.plant(tmp_path) as servers:
        fleet = plant.Fleet(
            servers, "test", 2, 1, decode_flags=mock_flags(), prefill_flags=mock_flags(), router={}
        )
        try:
            with fleet.window() as used:
                done = fleet.driver.do("load", conversations=8, at_once=4, seed=1)
        finally:
            fleet.close()
    assert (done["failed"], done["remote"], done["requests"]) == (0, 16, 16)
    assert len(done["stages"]["prefix_read"]) == 8, "the second turn has a hit where the first was"
    assert used["decode"].engine > 0
    assert used["prefill"].steps >= 1
