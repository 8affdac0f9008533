"""Both halves of `Tier` over vLLM's own classes, step by step. No engine is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.args import build_config
from tests.support.cluster import BLOCK, FLAGS
from tests.support.late import Late

torch: Any = Late("torch")
BLOCKS, LAYERS = 40, ("a", "b")


class Request(SimpleNamespace):
    """What the scheduler half reads of vLLM's Request."""

    __hash__ = object.__hash__


class Rig:
    """One rank. `step` is what vLLM's scheduler and model runner do with a connector."""

    def __init__(self, model_path: Path) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )

        config = build_config(
            str(model_path),
            [*FLAGS, "--kv-offloading-size=0.001"],
            kv_role="kv_consumer",
            engine_id="e",
        )
        _, (tier, child) = MultiConnector._get_connector_classes_and_configs(config)
        assert child is not config, "StockCore refuses a copy"
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        page = spec.page_size_bytes
        layers = list(LAYERS)
        caches = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(2 * BLOCKS * page, layers, BLOCKS * page, page)],
            kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        )
        self.worker = tier(child, KVConnectorRole.WORKER, caches)
        self.kv = {n: torch.randn(BLOCKS, 1, BLOCK, 2 * 8) for n in LAYERS}
        self.worker.register_kv_caches(self.kv)
        self.scheduler = tier(child, KVConnectorRole.SCHEDULER, caches)

    def request(self, name: str, blocks: int) -> Any:
        made = Request(
            request_id=name,
            block_hashes=[bytes([i]) * 32 for i in range(blocks)],
            num_tokens=blocks * BLOCK + 1,
            num_prompt_tokens=blocks * BLOCK + 1,
            num_computed_tokens=0,
            kv_transfer_params=None,
            kv_hints=None,
            skip_reading_prefix_cache=False,
            shared_prefix_boundary=0,
            status=None,
            is_finished=lambda: made.over,
            over=False,
        )
        self.scheduler.on_new_request(made)
        return made

    def step(self, *new: tuple[Any, list[int]], finished: tuple[str, ...] = ()) -> set[str]:
        """Compute these requests. Returns the requests whose KV was loaded."""
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, block_ids=[table]) for r, table in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens={r.request_id: r.num_tokens for r, _ in new},
            finished_req_ids=set(finished),
            preempted_req_ids=None,
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        meta = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_metadata(meta)
        self.worker.handle_preemptions(meta)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        loaded: set[str] = self.worker.get_transfer_results(set()).finished_recving
        told = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=told))
        return loaded

    def allocate(self, table: list[int], hit: int) -> None:
        """Give the next request these blocks. The first `hit` of them are cached."""
        blocks = [
            SimpleNamespace(block_id=i, is_null=False, block_hash=b"h" if at < hit else None)
            for at, i in enumerate(table)
        ]
        self.scheduler.bind_kv_cache_manager(
            SimpleNamespace(block_pool=None, get_blocks=lambda _: SimpleNamespace(blocks=[blocks]))
        )

    def end(self, request: Any) -> None:
        request.over = True
        self.scheduler.request_finished(request, [])

    def pages(self, blocks: list[int]) -> Any:
        return torch.stack([self.kv[name][blocks] for name in LAYERS]).clone()


@pytest.mark.parametrize("claimed", [True, False])
def test_what_a_peer_writes_is_never_stored_in_place_of_what_was_computed(
    model_path: Path, claimed: bool
) -> None:
    """Without the claim the copy begins a step later, and takes what the peer has written."""
    rig = Rig(model_path)
    first, mine = rig.request("first", 3), [5, 2, 7]
    assert rig.scheduler.hit(first, 0) == 0
    computed = rig.pages(mine)
    rig.step((first, [*mine, 9]))
    rig.end(first)  # its blocks are free, and the copies from them have not begun
    assert rig.scheduler.has_pending_push_work()

    if claimed:
        rig.scheduler.claim(mine)
        rig.step(finished=("first",))
    for name in LAYERS:
        rig.kv[name][mine] = -1.0  # a prefill worker writes into them
    rig.step(finished=() if claimed else ("first",))
    assert not rig.scheduler.has_pending_push_work()

    second = rig.request("second", 3)
    assert rig.scheduler.hit(second, 0) == 3 * BLOCK
    assert rig.scheduler.hit(second, BLOCK) == 2 * BLOCK
    theirs = [1, 8]
    rig.allocate([5, *theirs, 3], hit=1)
    rig.scheduler.load(second, 2 * BLOCK)
    assert rig.scheduler.hit(second, BLOCK) is None, "it is being loaded"
    assert rig.step() == {"second"}
    assert not rig.scheduler.has_pending_push_work()
    assert torch.equal(rig.pages(theirs), computed[:, 1:]) is claimed
