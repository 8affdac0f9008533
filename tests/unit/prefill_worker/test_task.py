"""What a prefill worker checks of a job that it was granted, before anything is computed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pullfill.engine import features
from pullfill.errors import BadMessage
from pullfill.ids import job_digest
from pullfill.prefill_worker.task import TooLong, check
from pullfill.wire import FenceToken, Grant, PrefillJob, encode, u32

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
    check(
        job, body, u32.unpack(job.token_ids), grant, features.digest(brought),
        block_size=4, compat_hash="c", max_prompt_tokens=most, groups=groups,
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
