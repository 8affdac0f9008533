"""vLLM's executor without a model. Name it with a flag of vLLM's own:

    pullfill decode … --distributed-executor-backend pullfill.testing.mock_executor.MockExecutor
                      --additional-config '{"mock": {"prefill_tokens_per_s": 20000}}'

It replaces only the computation: decisions, block ids, hits and frees are those of a real worker. A
step takes as long as the settings say. The KV cache is real memory, and transfer workers copy it.
Needs no weights. All methods run on the engine thread, where a step sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from pullfill.engine import kv
from pullfill.errors import ConfigError
from pullfill.runtime import log

logger = log.get("testing.mock_executor")

_LAYOUT = "LBHNC"
_KV_BYTES = 16 << 20  # 1 KiB per block of 16 tokens, by default


# The token that is always sampled.
TOKEN = 75
KEY = "mock"
_Number = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]


class MockSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the mock model."""

    # How fast prompts are computed. 0: in no time.
    prefill_tokens_per_s: _Number = 0.0
    # Seconds that each step takes besides, also if it only decodes.
    step_s: _Number = 0.0
    # The shape of the KV cache.
    layers: _Count = 2
    kv_heads: _Count = 1
    head_size: _Count = 8


class MockModel:
    """Counts tokens. Knows each scheduled request until vLLM says that it is finished."""

    def __init__(self, settings: MockSettings) -> None:
        self._settings = settings
        self._prompts: dict[str, int] = {}

    def step(self, scheduled: Any) -> dict[str, list[int]]:
        """The tokens sampled for each request of vLLM's SchedulerOutput: one where all tokens known
        so far are computed, none where a prompt goes on in a later step."""
        for request in scheduled.finished_req_ids:
            self._prompts.pop(request, None)
        counts, one = scheduled.num_scheduled_tokens, [TOKEN]
        sampled: dict[str, list[int]] = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = len(new.prefill_token_ids or new.prompt_token_ids)
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            whole = new.num_computed_tokens + counts[new.req_id] >= tokens
            sampled[new.req_id] = list(one) if whole else []
        old = scheduled.scheduled_cached_reqs
        for request, computed, outputs in zip(
            old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True
        ):
            whole = computed + counts[request] >= self._prompts[request] + outputs
            sampled[request] = list(one) if whole else []
        return sampled

    def seconds(self, scheduled: Any) -> float:
        """How long this step takes."""
        settings, tokens = self._settings, scheduled.total_num_scheduled_tokens
        if not tokens:
            return 0.0
        speed = settings.prefill_tokens_per_s
        return settings.step_s + (tokens / speed if speed else 0.0)


class MockExecutor(Executor):  # type: ignore[misc]
    """One rank, in the engine's own process."""

    # The bytes of its KV mean nothing: only workers with this executor exchange them (compat.py).
    KV_KIND = "mock"

    def _init_executor(self) -> None:
        logger.warning("there is no model here: every token is invented (mock executor)")
        config = self.vllm_config.additional_config
        given = config.get(KEY) if isinstance(config, Mapping) else None
        try:
            self._settings = msgspec.convert({} if given is None else given, MockSettings)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"additional config {KEY!r}: {exc}") from None
        self._model = MockModel(self._settings)
        self._connector: Any = None

    def collective_rpc(self, *_: Any, **__: Any) -> list[None]:
        """Do nothing for calls that would only change a model. There is no worker to call."""
        return [None]

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """The shape of a cache, small unless the settings say otherwise."""
        size = self._settings
        shape: dict[str, Any] = {
            "block_size": self.cache_config.block_size,
            "num_kv_heads": size.kv_heads,
            "head_size": size.head_size,
            "dtype": torch.bfloat16,
        }
        return [{f"mock.{at}": FullAttentionSpec(**shape) for at in range(size.layers)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[_LAYOUT]]

    def determine_available_memory(self) -> list[int]:
        return [self.cache_config.kv_cache_memory_bytes or _KV_BYTES]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Make the worker half of the connector and the memory it shares."""
        config = kv_cache_configs[0]
        if self.vllm_config.kv_transfer_config is None:
            return
        self._connector = KVConnectorFactory.create_connector(
            config=self.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=config
        )
        # The connector has a memory pool only for memory of the CPU.
        with self._connector.get_mem_pool_context() or nullcontext():
            self._connector.register_kv_caches(self._allocate(config))

    def _allocate(self, config: Any) -> dict[str, torch.Tensor]:
        """[block, head, token, K and V] for each layer, all in one buffer, layer after layer.
        Layers of different groups share memory, as in vLLM."""
        groups = [group.layer_names for group in config.kv_cache_groups]
        spec = config.kv_cache_groups[0].kv_cache_spec
        tokens, width = spec.block_size, 2 * spec.head_size
        layers = max(map(len, groups))
        shape = (layers, config.num_blocks, spec.num_kv_heads, tokens, width)
        nbytes = torch.Size(shape).numel() * spec.dtype.itemsize
        buffer = torch.zeros(nbytes, dtype=torch.int8, device=kv.device())
        caches = buffer.view(spec.dtype).view(shape)
        return {name: caches[at] for names in groups for at, name in enumerate(names)}

    def compile_or_warm_up_model(self) -> None:
        """Nothing to compile."""

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
        told = self._connector.get_handshake_metadata() if self._connector is not None else None
        return [{(0, 0): told}] if told is not None else []

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = self._model.step(scheduler_output)
        result = ModelRunnerOutput(
            req_ids=list(output),
            req_id_to_index={request: index for index, request in enumerate(output)},
            sampled_token_ids=list(output.values()),
            kv_connector_output=self._transfers(scheduler_output),
        )
        time.sleep(self._model.seconds(scheduler_output))
        if not non_block:
            return result
        done: Future[Any] = Future()
        done.set_result(result)
        return done

    def _transfers(self, scheduler_output: Any) -> KVConnectorOutput | None:
        """What vLLM's model runner asks the connector after each forward pass."""
        connector = self._connector
        if connector is None:
            return None
        connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)
        results = connector.get_transfer_results(scheduler_output.finished_req_ids)
        connector.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )

    def check_health(self) -> None:
        """Always well."""
