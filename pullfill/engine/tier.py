"""vLLM's own KV offloading, beside our connector: a second KV cache, in CPU memory or on disk.

vLLM's MultiConnector then has two connectors: ours, and `Tier`. That is vLLM's OffloadingConnector,
and what our connector asks of it.

vLLM copies a block one step after it was computed, also if its request has ended by then. If a
prefill worker wrote into the block meanwhile, vLLM would keep that KV under the wrong prompt. So
our connector calls `claim` for the blocks, and offers them when the step has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from pullfill import releases
from pullfill.errors import IncompatibleError
from pullfill.runtime import metrics

_ALLOCATED = "_current_batch_allocated_block_ids"
_BYTES = {
    "vllm:kv_offload_load_bytes": metrics.KV_OFFLOAD_BYTES.labels("load"),
    "vllm:kv_offload_store_bytes": metrics.KV_OFFLOAD_BYTES.labels("store"),
}
"""vLLM's names of what its offloading has copied."""


class Tier(OffloadingConnector):  # type: ignore[misc]
    """See the module. All methods here are of the scheduler half: engine thread."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._in_flight = set[Any]()
        scheduler = self.connector_scheduler
        if scheduler is not None and not hasattr(scheduler, _ALLOCATED):
            raise IncompatibleError(
                f"vLLM's OffloadingConnectorScheduler has no {_ALLOCATED}: use vLLM "
                f"{releases.VLLM}",
                field=_ALLOCATED,
            )

    @classmethod
    def of(cls, core: Any) -> Tier | None:
        """Return the tier of vLLM's EngineCore. None: it offloads no KV."""
        for connector in getattr(core.scheduler.connector, "sub_connectors", ()):
            if isinstance(connector, cls):
                connector._in_flight = core.scheduler._inflight_prefills
                return connector
        return None

    @property
    def busy(self) -> bool:
        """Whether copies run, whose end vLLM learns of in a step."""
        return bool(self.has_pending_push_work())

    def hit(self, request: Any, hit_tokens: int) -> int | None:
        """Return how many tokens beyond the prefix hit it has. None: it must be asked again."""
        found, _ = self.get_num_new_matched_tokens(request, hit_tokens)
        return None if found is None else int(found)

    def load(self, request: Any, tokens: int) -> None:
        """Load the first `tokens` tokens beyond the prefix hit into the request's blocks.

        vLLM then names the request in `finished_recving`."""
        blocks = self._kv_cache_manager.get_blocks(request.request_id)
        self.update_state_after_alloc(request, blocks, tokens)

    def claim(self, block_ids: Iterable[int]) -> None:
        """Have the step that is being scheduled wait for all copies from these blocks.

        They were allocated in this step. Once it has run, anybody may write into them."""
        getattr(self.connector_scheduler, _ALLOCATED).update(block_ids)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # The request has no blocks. But if a load into its blocks has failed, vLLM still reserves
        # as many for it. So it would need them twice, and if its prompt takes more than half of the
        # KV cache, it would wait forever.
        self._in_flight.discard(request)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        metrics.KV_OFFLOAD_TOKENS.inc(num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def get_kv_connector_stats(self) -> None:
        """Count what was copied. vLLM's frontend cannot show a connector that it does not have."""
        stats = super().get_kv_connector_stats()
        copied = stats.reduce() if stats is not None else {}
        for name in _BYTES.keys() & copied.keys():
            _BYTES[name].inc(copied[name])
