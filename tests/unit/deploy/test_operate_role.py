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


@pytest.mark.parametrize(
    ("report", "others", "why"),
    [
        (Report(), [record("decode-1")], "start it with --elastic"),
        (None, [record("decode-1")], "does not answer"),
        (ELASTIC, [], "only decode worker"),
        (ELASTIC, [record("prefill-1")], "only decode worker"),
        (ELASTIC, [record("decode-1", state=WorkerState.DRAINING)], "only decode worker"),
    ],
    ids=["not elastic", "silent", "alone", "prefill", "draining"],
)
def test_what_is_refused(report: Report | None, others: list[Any], why: str) -> None:
    with pytest.raises((ConfigError, UnavailableError), match=why):
        order(WorkerRole.PREFILL, report, others=others)
    if report is ELASTIC:
        order(WorkerRole.PREFILL, others=others, force=True)
        order(WorkerRole.PREFILL, others=[*others, record("decode-2")])
        order(WorkerRole.BOTH, others=others)
