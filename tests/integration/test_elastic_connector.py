"""Which side of an elastic worker's connector gets a call of vLLM's. No engine runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.connector import DecodeMetadata
from pullfill.elastic.connector import ElasticConnector, ElasticMetadata
from pullfill.prefill_worker.connector import PrefillMetadata
from pullfill.prefill_worker.scheduler import Reports

pytestmark = pytest.mark.engine


class FakeConnector:
    """Notes the calls about requests. Everything else answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[tuple[str, str]] = []
        self.work = False

    def __getattr__(self, call: str) -> Any:
        def note(request: Any, *_: Any) -> Any:
            self.requests.append((call, request.request_id))
            return self.name, call

        return note

    def build_connector_meta(self, output: Any) -> Any:
        return self.name, output

    def has_pending_push_work(self) -> bool:
        return self.work


@pytest.fixture
def connector() -> Any:
    made: Any = ElasticConnector.__new__(ElasticConnector)
    made._decode, made._prefill = FakeConnector("decode"), FakeConnector("prefill")
    made._context = SimpleNamespace(prefill=SimpleNamespace(tasks={"job": object()}))
    return made


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


CALLS = ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished_all_groups")


def test_a_job_goes_to_the_prefill_side_and_all_else_to_the_decode_side(connector: Any) -> None:
    for call in CALLS:
        for name in ("job", "client"):
            arguments = [None] * (2 if call == "update_state_after_alloc" else 1)
            getattr(connector, call)(request(name), *arguments)
    assert connector._prefill.requests == [(call, "job") for call in CALLS]
    assert connector._decode.requests == [(call, "client") for call in CALLS]


def test_both_sides_are_asked_about_every_step(connector: Any) -> None:
    meta = connector.build_connector_meta("output")
    assert (meta.decode, meta.prefill) == (("decode", "output"), ("prefill", "output"))
    assert not connector.has_pending_push_work()
    connector._prefill.work = True
    assert connector.has_pending_push_work()


def test_the_reports_of_both_sides_reach_vllm(connector: Any) -> None:
    reports = Reports(read_ok={"a"}, read_failed={"b"}, sent={"c"})
    connector._connector_metadata = ElasticMetadata(
        DecodeMetadata(loaded={"d"}, failed={"e"}), PrefillMetadata(reports)
    )
    found = connector.get_transfer_results(set())
    assert found.finished_sending == {"c"}
    assert found.finished_recving == {"a", "b", "d", "e"}
    assert found.failed_recving == {"b", "e"}
    connector._connector_metadata = None
    assert not connector.get_transfer_results(set()).finished_recving
