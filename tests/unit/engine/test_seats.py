"""`--reserve-seats`: vLLM's limit is lower by the requests whose KV is on its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import release
from pullfill.engine.seats import Seats
from pullfill.errors import Outcome
from tests.unit.decode_worker.test_scheduler import BLOCK, Rig

LIMIT = release.this.seats


def core(most: int = 3) -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace(**{LIMIT: most}))


def test_each_seat_counts_once() -> None:
    made = core()
    seats = Seats(made)
    limits = []
    for change in (
        lambda: seats.take("a"),
        lambda: seats.take("a"),
        lambda: seats.take("b"),
        lambda: seats.leave(["x"]),
        lambda: seats.leave(["a", "x"]),
        lambda: seats.leave(["a"]),
        lambda: seats.leave(["b"]),
    ):
        change()
        limits.append(getattr(made.scheduler, LIMIT))
    assert limits == [2, 2, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("end", ["settled", "finished"])
def test_a_remote_prompt_keeps_a_seat_until_it_can_run_or_is_over(end: str) -> None:
    made = core()
    rig = Rig(seats=Seats(made))
    rig.send(2 * BLOCK, name="r")
    rig.send(2 * BLOCK, name="s")
    rig.side.step_done()
    assert getattr(made.scheduler, LIMIT) == 1
    if end == "finished":
        rig.side.request_finished("r")
    else:
        first = rig.published[0]
        rig.ledger.give_up(first.job_id, Outcome.PUBLISH_FAILED)
        rig.side.finish()
    assert getattr(made.scheduler, LIMIT) == 2
