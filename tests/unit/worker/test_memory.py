"""The workers' KV memory: every rank mapped and published, or out of reach and said so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pullfill.engine.groups import ONE_GROUP
from pullfill.engine.kv import NO_ATTENTION, UNSCALED, total_heads
from pullfill.errors import ConfigError, IncompatibleError
from pullfill.options import WorkerOptions
from pullfill.transfer.owners import Owner, RankRegion
from pullfill.transfer.shm.files import RegionFiles
from pullfill.worker import memory
from pullfill.worker.context import WorkerContext

BLOCKS, HEADS, LAYERS, PAGE = 6, 2, 3, 4096
STAGE = RankRegion(pid=1, device="cuda", num_layers=LAYERS, page_bytes=PAGE)
OUT_OF_REACH = dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], STAGE)


def opened(context: WorkerContext, told: dict[tuple[int, int], RankRegion]) -> Owner:
    memory.attach(context, told, HEADS, (NO_ATTENTION, UNSCALED), ONE_GROUP)
    memory.open_to_peers(context, WorkerOptions(model="m"), None, decodes=True)
    return context.owner


def test_memory_out_of_reach_is_said_and_grants_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = WorkerContext("decode-x", RegionFiles("decode-x", tmp_path))
    lacks = {rank: replace(one, why_not="no driver") for rank, one in OUT_OF_REACH.items()}
    owner = opened(context, lacks)
    assert (owner.transports, owner.describe()) == ([], ())
    with pytest.raises(ConfigError, match="closed"):
        owner.fences.open([1])
    assert context.memories == []
    made = context.geometry
    assert made is not None
    assert (made.num_layers, made.page_bytes) == (2 * LAYERS, PAGE)
    assert "it sends no prefill jobs and gets none (no driver)" in caplog.text


def test_a_prefill_worker_that_nobody_can_read_from_is_no_reason_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads its KV: it writes. So it may have transports that readers cannot use, for
    example with `--transports nccl`."""
    context = WorkerContext("prefill-x", RegionFiles("prefill-x", tmp_path))
    one = SimpleNamespace(device=None, layout=None)
    monkeypatch.setattr(WorkerContext, "memories", [one])
    options = WorkerOptions(model="m", transports=frozenset({"nccl"}))
    memory.open_to_peers(context, options, None, decodes=False)
    assert context.owner.describe() == ()
    assert "no transport" not in caplog.text
    context.owner.close()


def config(**changes: int | bool) -> SimpleNamespace:
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    model = SimpleNamespace(use_mla=changes.pop("mla", False), get_total_num_kv_heads=lambda: 8)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel | changes), model_config=model
    )


@pytest.mark.parametrize("way", ["decode", "prefill"])
def test_context_parallelism_is_refused(way: str) -> None:
    """Without it a model has the heads that its caches hold."""
    assert (total_heads(config()), total_heads(config(mla=True))) == (8, 1)
    with pytest.raises(IncompatibleError, match="context parallelism"):
        total_heads(config(**{f"{way}_context_parallel_size": 2}))
