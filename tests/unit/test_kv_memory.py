"""KV memory that no transport reaches: the worker serves on its own and says why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pullfill.decode_worker import memory as decode_memory
from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.ledger import Ledger
from pullfill.decode_worker.router import Situation, decide
from pullfill.decode_worker.story import Stories
from pullfill.engine.kv import geometry, require_one_group
from pullfill.errors import IncompatibleError, OverloadedError
from pullfill.prefill_worker import memory as prefill_memory
from pullfill.prefill_worker.context import PrefillContext
from pullfill.wire import RouterConfig

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 6, 2, 32, 64, 3


def caches(device: str) -> dict[str, torch.Tensor]:
    """One storage, LBHNC, as vLLM makes it; `meta` stands for memory that is not the CPU's."""
    whole = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16, device=device)
    return {f"layer{i}": whole[i] for i in range(LAYERS)}


def decode_context() -> DecodeContext:
    return DecodeContext(
        instance_id="decode-x",
        incarnation="i0",
        router_config=RouterConfig,
        situation=Situation,
        publish=lambda job: None,
        stories=Stories("decode-x"),
        make_ledger=lambda fences: Ledger(fences, incarnation="i0"),
    )


def test_geometry_counts_layers_and_page_bytes() -> None:
    tensors = caches("cpu")
    tensors["shared"] = tensors["layer0"]  # a layer that reuses another's cache
    found = geometry(tensors)
    assert (found.num_layers, found.page_bytes, found.device) == (LAYERS, TOKENS * WIDTH * 2, "cpu")


def test_decode_worker_with_memory_out_of_reach_prefills_everything_itself() -> None:
    context = decode_context()
    decode_memory.register(context, caches("meta"), BLOCKS)
    assert context.owner is None
    assert context.memory is None
    assert context.ledger is not None
    now = Situation(5000, 0, "no_transport", prefill_workers=3, queue_available=True)
    assert (decide(now, RouterConfig()).remote, decide(now, RouterConfig()).reason) == (
        False,
        "no_transport",
    )
    context.ledger.open("j", "r", (1, 2), first_target=0, hit_tokens=0, timeout_s=1)
    assert context.ledger.claim("j", "i0", "writer").grant is None


def test_no_fence_grants_nothing() -> None:
    with pytest.raises(OverloadedError):
        decode_memory._NoFences().open([1])


def test_prefill_worker_with_memory_out_of_reach_knows_its_shape_only() -> None:
    context = PrefillContext("prefill-x", wake=lambda: None)
    prefill_memory.register(context, caches("meta"), BLOCKS)
    assert context.memory is None
    assert context.geometry is not None
    assert context.geometry.device == "meta"
    prefill_memory.register(context, caches("cpu"), BLOCKS)
    assert context.memory is not None
    assert context.memory.layout.num_blocks == BLOCKS


@pytest.mark.parametrize("groups", [0, 2])
def test_several_kv_cache_groups_are_refused_by_name(groups: int) -> None:
    require_one_group(SimpleNamespace(kv_cache_groups=[object()]))
    with pytest.raises(IncompatibleError, match=f"{groups} KV cache groups") as refused:
        require_one_group(SimpleNamespace(kv_cache_groups=[object()] * groups))
    assert refused.value.field == "kv_cache_groups"
