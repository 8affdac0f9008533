"""What a prefill worker checks of a job that it was granted, and what it tells its engine of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pullfill.engine import features
from pullfill.errors import BadMessage
from pullfill.ids import job_digest
from pullfill.prefill_worker.engine import PrefillEngine
from pullfill.prefill_worker.task import TooLong, check
from pullfill.wire import FenceToken, Grant, Hello, PrefillJob, encode, u32
from tests.support.fakes import prefill_task

JOB = PrefillJob(
    job_id="j", incarnation="i", decode_instance="d", request_id="r", compat="c",
    token_ids=u32.pack(range(12)), hit_tokens=4, block_ids=u32.pack([9, 5, 7]),
    timeout_s=60.0,
)  # fmt: skip
WINDOW: dict[str, Any] = {
    "read_from": (0, 1), "kept_from": (0, 2), "block_ids": u32.pack([9, 5, 7, 8]),
}  # fmt: skip
"""Twelve tokens in two groups. The second has the last block only."""


def checked(job: PrefillJob, *, groups: int = 1, most: int = 100, brought: bytes = b"") -> None:
    body = encode(job)
    grant = Grant(
        rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=60,
        job_digest=job_digest(body), fence=FenceToken(slot=0, epoch=1), features=brought,
    )  # fmt: skip
    hello = Hello(prefill_instance="p", compat="c", max_prompt_tokens=most)
    check(
        job, body, u32.unpack(job.token_ids), grant, features.digest(brought), hello,
        block_size=4, groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kept_from": (2,)}, "blocks"),
        ({"read_from": (1,)}, "blocks"),
        ({"block_ids": u32.pack([9, 5])}, "blocks"),
        ({"block_ids": u32.pack([9, 5, 7])[:-1]}, "blocks"),
        ({"hit_tokens": 5}, "blocks"),
        (WINDOW, "2 KV cache groups"),
        ({"compat": "other"}, "compatibility hash"),
    ],
)
def test_a_job_that_does_not_fit_is_told_by_what(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        checked(msgspec.structs.replace(JOB, **changes))


def test_a_grant_brings_the_features_that_the_job_names() -> None:
    named = msgspec.structs.replace(JOB, features=features.digest(b"red"))
    checked(named, brought=b"red")
    for job, wrong in ((named, b"blue"), (named, b""), (JOB, b"red")):
        with pytest.raises(BadMessage, match="multimodal"):
            checked(job, brought=wrong)


def test_a_prompt_beyond_this_workers_context_is_no_poison() -> None:
    with pytest.raises(TooLong, match="12 tokens"):
        checked(JOB, most=11)


@pytest.mark.parametrize(
    ("due_s", "left_s", "target_ms", "waited_s"),
    [
        (0.9, 0.4, 900, 0.5),
        (0.9, -2.0, 900, 2.9),
        (0.9, None, 900, 0.0),  # an older decode worker does not tell it
        (-1.0, -1.5, 1, 0.5),
        (0.0, None, None, 0.0),
    ],
)
def test_its_target_counts_from_when_the_request_was_decided(
    due_s: float, left_s: float | None, target_ms: float | None, waited_s: float
) -> None:
    """Clocks of machines differ. So the grant tells how many seconds are left until its target."""
    asked: list[Any] = []

    def add(request: Any) -> Future[Any]:
        asked.append(request)
        return Future()

    requests: Any = SimpleNamespace(add=add)
    parts: Any = SimpleNamespace(adapters=None, groups=SimpleNamespace(layers=()))
    engine = PrefillEngine(requests, {}, parts, lambda _: 0)
    task = prefill_task(None)
    task.job = msgspec.structs.replace(task.job, due_s=due_s)
    task.grant = msgspec.structs.replace(task.grant, due_s=left_s)
    began = time.time()
    engine.submit(task)
    (request,) = asked
    assert began - request.arrival_time == pytest.approx(waited_s, abs=0.2)
    assert (request.sampling_params.extra_args or {}).get("ttft_ms") == target_ms
