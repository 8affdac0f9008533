"""vLLM 0.30."""

from __future__ import annotations

from typing import Any

from pullfill.engine.release import v0_31


class Release(v0_31.Release):
    """There is one parameter for log probabilities of the prompt. vLLM does not ask the connector
    where to allocate the KV cache."""

    prompt_logprobs = ("prompt_logprobs",)

    def memory_pool(self, what: str) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if what != "kv_cache" or not has_kv_transfer_group():
            return None
        return get_kv_transfer_group().get_mem_pool_context()
