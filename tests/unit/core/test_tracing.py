"""Spans reach a real OTLP receiver. What is off costs nothing, what hangs stops nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pullfill.runtime import tracing
from pullfill.runtime.tracing import Context
from tests.support.http_stub import serving
from tests.support.otlp import Receiver
from tests.support.waiting import patience, until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def _ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    yield
    tracing.close()


def test_who_decides_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        tracing.begin(receiver.url, "frontend", "f")
        new = tracing.root(None)
        assert new is not None
        assert new[1] is None
        assert new[0].trace_id
        unsampled = f"00-{TRACE}-{SPAN}-00"
        assert tracing.root({"traceparent": unsampled}) is tracing.read(unsampled) is None
        known = tracing.read(CLIENT)
        assert known is not None
        assert known.header == CLIENT
        assert tracing.read("garbage") is tracing.read(None) is None
        assert tracing.root({"traceparent": "garbage"}) is not None, "as if there were none"
        tracing.close()
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        tracing.begin(receiver.url, "frontend", "f")
        assert tracing.root({}) is None
        assert tracing.root({"traceparent": CLIENT}) is not None, "the client's word counts"


def test_an_endpoint_that_hangs_stops_nothing_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pullfill"), "propagate", True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    before = set(threading.enumerate())
    asked, free = threading.Event(), threading.Event()

    def answer(*_: object) -> tuple[int, Any]:
        asked.set()
        free.wait(60.0)
        return 200, {}

    with serving(answer) as url, caplog.at_level(logging.INFO):
        tracing.begin(url.replace("://", "://user:s3cr3t@"), "decode", "d")
        for number in range(5000):  # more than the queue holds
            tracing.record("x", Context(1, number + 1), None, 0.0, 1.0, {})
        assert asked.wait(30.0)
        (line,) = _lines(caplog, "takes no traces")
        assert url in line
        free.set()
        tracing.record("later", Context(1, 2), None, 0.0, 1.0, {})
        _lines(caplog, "takes traces again")
        free.clear()
        tracing.record("last", Context(1, 3), None, 0.0, 1.0, {})
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < patience(7.0)
        free.set()
    # An exporter that still tries draws random numbers, which fails other tests by Hypothesis.
    for thread in set(threading.enumerate()) - before:
        thread.join(20.0)
        assert not thread.is_alive()
    assert "s3cr3t" not in caplog.text
    assert all(r.name.startswith("pullfill") for r in caplog.records), "the exporter's own lines"


def _lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Wait for a line with this text. Returns all such lines."""

    def told() -> list[str]:
        # pytest also listens at loggers that do not propagate when a test begins, so where this one
        # does meanwhile, a record is there twice.
        records = {id(record): record for record in caplog.records}.values()
        return [line for record in records if text in (line := record.getMessage())]

    lines: list[str] = until(told, 30.0, text)
    return lines
