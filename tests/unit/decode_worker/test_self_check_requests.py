"""The requests of a self-check, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.self_check_requests import Trials
from pullfill.errors import TransferFailed
from tests.support.fakes import FakeClock
from tests.support.transfer_rigs import DENSE, extent, memory_over, random_bytes


class Host:
    """Takes what is submitted to the engine, and runs nothing."""

    def __init__(self) -> None:
        self.submitted: list[Callable[[Any], None]] = []

    def submit(self, work: Callable[[Any], None]) -> None:
        self.submitted.append(work)


async def test_kv_that_cannot_be_read_harms_no_step(caplog: pytest.LogCaptureFixture) -> None:
    memory = memory_over(random_bytes(extent(DENSE), seed=1), DENSE)
    host: Any = Host()
    traces = RequestTraces("decode-1", FakeClock())
    trials = Trials(asyncio.get_running_loop(), host, traces, [memory], logprobs=None)
    running = asyncio.create_task(trials.run([1, 2, 3], salt="s", blocks=2))
    await asyncio.sleep(0)
    (trial,) = trials._open.values()

    def fails(_: object) -> None:
        raise TransferFailed("no memory is left on the GPU")

    readers = trials._readers
    trials._readers = [SimpleNamespace(pages=fails)]  # type: ignore[list-item]
    trials.finished(trial.request_id, [[4, 5]])
    assert trial.pages == []
    assert "no memory is left on the GPU" in caplog.text
    trials._readers = readers
    trials.finished(trial.request_id, [[4, 5]])
    assert len(trial.pages) == 1
    running.cancel()
