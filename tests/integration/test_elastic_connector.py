"""Which side of a worker gets a call that vLLM makes to the connector. No engine runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.worker import memory
from pullfill.worker.connector import WorkerConnector
from pullfill.worker.context import WorkerContext
from pullfill.worker.ports import StepReport

pytestmark = pytest.mark.engine


class Half:
    """Notes the calls about requests. mine: ids of its requests."""

    def __init__(self, name: str, mine: set[str]) -> None:
        self.name, self.mine = name, mine
        self.context = WorkerContext("worker-1")
        self.requests: list[tuple[str, str]] = []
        self.has_work = False

    def attached(self, context: WorkerContext, first: Any) -> None:
        assert context is self.context

    def owns(self, request_id: str) -> bool:
        return request_id in self.mine

    def matched(self, request: Any, hit: int) -> tuple[int, bool]:
        self.requests.append(("matched", request.request_id))
        return hit, False

    def allocated(self, request: Any, tables: Any, external: int) -> None:
        self.requests.append(("allocated", request.request_id))

    def finished(self, request_id: str, tables: Any) -> bool:
        self.requests.append(("finished", request_id))
        return self.name == "prefill"

    def scheduled(self, output: Any) -> StepReport:
        name = self.name
        return StepReport({f"{name} {output}"}, {f"{name} failed"}, {f"{name} sent"})


@pytest.fixture
def connector() -> Any:
    made: Any = WorkerConnector.__new__(WorkerConnector)
    made._halves = [Half("decode", set()), Half("prefill", {"job"})]
    made._contexts = [half.context for half in made._halves]
    return made


def test_a_job_goes_to_the_prefill_side_and_all_else_to_the_decode_side(connector: Any) -> None:
    blocks = SimpleNamespace(get_block_ids=lambda: ([1],))
    for name in ("job", "client"):
        request = SimpleNamespace(request_id=name)
        connector.get_num_new_matched_tokens(request, 3)
        connector.update_state_after_alloc(request, blocks, 0)
        assert connector.request_finished_all_groups(request, ([1],)) == (name == "job", None)
    decode, prefill = connector._halves
    assert prefill.requests == [(call, "job") for call in ("matched", "allocated", "finished")]
    assert [name for _, name in decode.requests] == ["client"] * 3


def test_both_sides_number_the_adapters_of_their_engine_together(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would take two adapters with one number for one."""
    monkeypatch.setattr(memory, "attach", lambda *_: None)
    decode, prefill = connector._contexts
    assert prefill.adapters is not decode.adapters
    connector.attach({}, 1, None)
    assert prefill.adapters is decode.adapters
    assert prefill.ranks is decode.ranks


def test_what_both_sides_report_of_a_step_reaches_vllm(connector: Any) -> None:
    assert not connector.has_pending_push_work()
    connector._halves[1].has_work = True
    assert connector.has_pending_push_work()
    connector._connector_metadata = connector.build_connector_meta("step")
    found = connector.get_transfer_results(set())
    assert found.finished_sending == {"decode sent", "prefill sent"}
    failed = {"decode failed", "prefill failed"}
    assert found.failed_recving == failed
    assert found.finished_recving == {"decode step", "prefill step"} | failed
    connector._connector_metadata = None
    assert not connector.get_transfer_results(set()).finished_recving
