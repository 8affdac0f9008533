"""vLLM 0.30."""

from __future__ import annotations

from typing import Any

from pullfill.engine.release import v0_31


class Release(v0_31.Release):
    """There is one parameter for log probabilities of the prompt. The registry knows which models
    take more than text. vLLM does not ask the connector where to allocate the KV cache. On CPU it
    judges drafts with a kernel for GPUs. As many requests run as its model runner has slots."""

    speculates_on_cpu = False
    offloads_kv = False
    seats = "max_num_running_reqs"
    held = "skipped_waiting"

    prompt_logprobs = ("prompt_logprobs",)

    def takes_features(self, model_config: Any) -> bool:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        return bool(MULTIMODAL_REGISTRY.supports_multimodal_inputs(model_config))

    def memory_pool(self, what: str) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if what != "kv_cache" or not has_kv_transfer_group():
            return None
        group = get_kv_transfer_group()
        # Ours is the first one of several (kv_offloading.py), in
        # vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.
        ours = next(iter(getattr(group, "sub_connectors", (group,))))
        return ours.get_mem_pool_context()
