"""Wire structs: strict both ways, and nothing but BadMessage on bad bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pullfill import wire
from pullfill.errors import BadMessage
from tests.support.wire_examples import example

COMPAT = example(wire.Compat)
JOB = example(wire.PrefillJob)


@pytest.mark.parametrize(
    "change",
    [
        {"v": wire.WIRE_VERSION + 1},
        {"v": 0},
        {"job_id": ""},
        {"job_id": "x" * 129},
        {"hit_tokens": -1},
        {"hit_tokens": "0"},
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"token_ids": [1, 2]},
    ],
)
def test_a_job_out_of_range_is_refused(change: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(msgspec.msgpack.decode(wire.encode(JOB)) | change)
    with pytest.raises(BadMessage):
        wire.decode(body, wire.PrefillJob)


def test_every_field_of_compat_counts() -> None:
    for name, value in msgspec.to_builtins(COMPAT).items():
        other = msgspec.structs.replace(COMPAT, **{name: value + type(value)(1)})
        assert other.hash() != COMPAT.hash(), name
        assert COMPAT.differs_from(other) == [(name, value, getattr(other, name))]
    assert COMPAT.differs_from(COMPAT) == []
    assert len(COMPAT.hash()) == len("v11-") + 16


@pytest.mark.essential
def test_explain_and_queue_have_the_promised_shape() -> None:
    record = wire.ExplainRecord(
        request_id="r", path="local", reason="x", prompt_tokens=1, prefix_hit_tokens=0,
        remote_tokens=0, decode_instance="d",
    )  # fmt: skip
    shape = msgspec.to_builtins(record)
    assert set(shape) == {
        "request_id", "path", "reason", "prompt_tokens", "prefix_hit_tokens", "remote_tokens",
        "decode_instance", "prefill_instance", "attempts", "fallback", "kv_bytes", "timings_ms",
        "transport", "why_not_better", "migrated_from", "migrated_tokens", "outage",
        "expected_s", "offloaded_tokens", "decode_choice", "fetched_tokens", "fetched_from",
        "fetch", "choice", "predicted_ms", "outcome_ms", "regret_ms",
        "stages",
    }  # fmt: skip
    assert set(shape["timings_ms"]) == {
        "route", "queue", "claim", "prefix_read", "fetch", "prefill", "kv_write", "tail",
        "commit", "first_token",
    }  # fmt: skip
    assert set(msgspec.to_builtins(wire.QueueStatus())) == {
        "depth_jobs", "depth_tokens", "in_flight", "oldest_age_s", "age_s",
    }  # fmt: skip
    server = wire.ServerStatus(up=False, since_s=1.0, error="x")
    assert set(msgspec.to_builtins(server)) == {"up", "since_s", "error"}
