"""Which orders to change a role are refused, and why."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.deploy.operate import check_role
from pullfill.errors import ConfigError, UnavailableError
from pullfill.snapshot import Report
from pullfill.wire import WorkerRole, WorkerState
from tests.support.workers import record

ELASTIC = Report(load={"elastic": "decode"})


def order(wanted: WorkerRole, report: Report | None = ELASTIC, **how: Any) -> None:
    """Order `worker-1`, which decodes. others: more workers."""
    mine = record("worker-1", role="decode")
    check_role([mine, *how.pop("others", ())], mine, report, wanted, force=how.pop("force", False))


def test_a_worker_without_the_flag_keeps_its_role() -> None:
    with pytest.raises(ConfigError, match="start it with --elastic"):
        order(WorkerRole.PREFILL, Report(), others=[record("decode-1")])


def test_a_worker_that_does_not_answer_is_not_ordered() -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        order(WorkerRole.PREFILL, None)


@pytest.mark.parametrize("role", [WorkerRole.DECODE, WorkerRole.BOTH])
def test_the_only_decode_worker_may_stay_one(role: WorkerRole) -> None:
    order(role)


@pytest.mark.parametrize(
    "others",
    [[], [record("prefill-1")], [record("decode-1", state=WorkerState.DRAINING)]],
    ids=["alone", "prefill", "draining"],
)
def test_the_only_decode_worker_leaves_only_if_forced(others: list[Any]) -> None:
    with pytest.raises(ConfigError, match="only decode worker"):
        order(WorkerRole.PREFILL, others=others)
    order(WorkerRole.PREFILL, others=others, force=True)
    order(WorkerRole.PREFILL, others=[*others, record("decode-2")])
