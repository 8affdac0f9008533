"""What an elastic worker does with a job that its own decode side has sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.decode_worker.ledger import JobState
from pullfill.elastic.context import ElasticContext
from pullfill.elastic.worker import ElasticRole, take_back
from pullfill.errors import ClaimRefused, ConfigError, Outcome
from pullfill.options import WorkerOptions
from pullfill.wire import PrefillJob, RefuseReason, encode
from tests.support import said
from tests.support.handoff_model import HandoffModel


def delivery(job_id: str, decode_instance: str = "me") -> Any:
    return SimpleNamespace(
        body=encode(
            PrefillJob(
                job_id=job_id, incarnation="i0", decode_instance=decode_instance,
                request_id="r", compat="c", token_ids=b"", hit_tokens=0,
                block_ids=b"", timeout_s=60.0,
            )
        )
    )  # fmt: skip


async def test_what_elastic_workers_cannot_do_is_refused_however_it_was_asked_for() -> None:
    """Its flags have several spellings, and may stand in a file."""
    tier = {"kv_connector": "Tier", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    extra = {"connectors": [{"kv_connector": "Decode"}, tier]}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    role = ElasticRole("decode", ClusterRef("n", "e", "q"), WorkerOptions(model="m"))
    with pytest.raises(ConfigError, match="KV offloading"):
        role.adjust(config)
    extra["connectors"].remove(tier)
    config.parallel_config = SimpleNamespace(world_size=2)
    with pytest.raises(ConfigError, match="one rank"):
        role.adjust(config)


def test_both_sides_number_the_adapters_of_their_engine_together() -> None:
    """vLLM would take two adapters with one number for one."""
    decode = SimpleNamespace(geometry=None, ranks=[], adapters=object())
    both: Any = SimpleNamespace(decode=decode, prefill=SimpleNamespace())
    ElasticContext.share(both)
    assert both.prefill.adapters is decode.adapters


def test_a_job_of_another_decode_worker_is_not_taken_back() -> None:
    model = HandoffModel()
    assert not take_back(delivery("j", "other"), "me", model.ledger)
    assert not take_back(SimpleNamespace(body=b"junk"), "me", model.ledger)  # type: ignore[arg-type]


def test_a_job_that_another_worker_has_is_not_taken_back() -> None:
    """It is granted, and then it waits for the proof that its writer is quiet."""
    model = HandoffModel()
    job = model.open(2)
    assert job is not None
    model.publish(job)
    name = job.job.job_id
    grant = model.claim(job, "a").grant
    assert grant is not None
    entry = model.ledger.find(name)
    assert entry is not None
    with pytest.raises(ClaimRefused) as granted:
        take_back(delivery(name), "me", model.ledger)
    assert granted.value.reason == RefuseReason.IN_PROGRESS
    slot = model.fences.valid(grant.fence)
    slot.holders += 1
    said.gave_up(model.ledger, name, grant.attempt, "i0", "a", "failed", retry=True)
    assert entry.state is JobState.QUARANTINED
    with pytest.raises(ClaimRefused) as waits:
        take_back(delivery(name), "me", model.ledger)
    assert waits.value.reason == RefuseReason.HELD
    slot.holders -= 1
    model.ledger.tick()
    assert entry.state is JobState.QUEUED
    assert take_back(delivery(name), "me", model.ledger)
    assert model.outcomes == [(name, Outcome.OWN_JOB)]
    assert take_back(delivery(name), "me", model.ledger), "nobody waits for it"
