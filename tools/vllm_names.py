"""Names of vLLM that pullfill uses and does not import: most of vLLM's objects reach it as `Any`.

No worker checks them at its start: it takes released versions only (pullfill/releases.py), and a
test has looked these names up in each of them. check_release.py looks them up in the next one.
`Struct:field` is a field of a msgspec struct or dataclass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module

from pullfill.engine import migration

Names = Mapping[str, Iterable[str]]

NAMES: Names = {
    "vllm.v1.engine.core": (
        "EngineCore.step",
        "EngineCore.post_step",
        "EngineCore.add_request",
        "EngineCore.abort_requests",
        "EngineCore.collective_rpc",
        "EngineCore.preprocess_add_request",
        "EngineCore.get_supported_tasks",
        "EngineCore.shutdown",
    ),
    "vllm.v1.engine": (
        "EngineCoreRequest:cache_salt",
        "EngineCoreRequest:client_index",
        "EngineCoreOutput:prefill_stats",
        "UtilityOutput:failure_message",
        "FinishReason.ERROR",
        "EngineCoreRequest:request_id",
        "EngineCoreRequest:external_req_id",
        "EngineCoreRequest:arrival_time",
        "EngineCoreRequest:resumable",
        "EngineCoreRequest:abort_immediately",
        "EngineCoreOutput:finish_reason",
        "EngineCoreOutput:kv_transfer_params",
        "EngineCoreOutputs:utility_output",
        "EngineCoreOutputs:scheduler_stats",
        "EngineCoreOutputs:engine_index",
        "EngineCoreRequest:prompt_token_ids",
        "EngineCoreRequest:prompt_embeds",
        "EngineCoreRequest:sampling_params",
        "EngineCoreOutput:new_token_ids",
        "EngineCoreOutput:events",
    ),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.has_requests",
        "Scheduler.get_request_counts",
        "Scheduler._update_from_kv_xfer_finished",
    ),
    "vllm.v1.outputs": ("KVConnectorOutput:finished_recving",),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput:preempted_req_ids",
        "SchedulerOutput:num_scheduled_tokens",
    ),
    "vllm.v1.core.block_pool": (
        "BlockPool.get_cached_block",
        "BlockPool.touch",
        "BlockPool.free_blocks",
        "BlockPool.get_num_free_blocks",
    ),
    "vllm.lora.request": ("LoRARequest:is_3d_lora_weight",),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager.get_block_ids",),
    "vllm.v1.core.single_type_kv_cache_manager": (
        "SingleTypeKVCacheManager.get_num_skipped_tokens",
    ),
    "vllm.v1.request": ("Request", "RequestStatus.WAITING_FOR_REMOTE_KVS"),
    "vllm.v1.structured_output.request": ("StructuredOutputRequest:_grammar",),
    "vllm.v1.structured_output.backend_types": (
        "StructuredOutputGrammar.accept_tokens",
        "StructuredOutputGrammar.fill_bitmask",
    ),
    "vllm.config": ("CompilationConfig:static_forward_context", "LoRAConfig:max_cpu_loras"),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase.get_attn_backend",),
    "vllm.v1.attention.backend": ("AttentionBackend.get_name",),
    "vllm.distributed.kv_events": (
        "BlockStored:extra_keys",
        "BlockStored:group_idx",
        "BlockStored:lora_name",
        "BlockStored:medium",
        "BlockStored:parent_block_hash",
        "BlockRemoved:group_idx",
        "BlockRemoved:medium",
    ),
    "vllm.v1.metrics.stats": ("PrefillStats:num_local_cached_tokens",),
    "vllm.v1.executor": ("Executor.get_class",),
    "vllm.v1.executor.multiproc_executor": ("WorkerProcHandle:proc", "WorkerProcHandle:rank"),
    "vllm.v1.worker.gpu_input_batch": ("CachedRequestState:generator",),
    "vllm.v1.worker.worker_base": ("WorkerBase.sample_tokens", "WorkerBase.add_lora"),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "SupportsHMA.request_finished_all_groups",
        "KVConnectorTransferResults:failed_recving",
        "KVConnectorBase_V1.get_transfer_results",
        "KVConnectorBase_V1.bind_kv_cache_manager",
        "KVConnectorBase_V1.has_pending_push_work",
        "KVConnectorBase_V1.get_handshake_metadata",
        "KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware",
        "KVConnectorBase_V1.get_required_kvcache_layout",
    ),
    "vllm.v1.engine.core_client": ("EngineCoreClient.make_async_mp_client",),
    "vllm.v1.engine.async_llm": (
        "AsyncLLM.add_request",
        "AsyncLLM._run_output_handler",
        "EngineCoreClient",
    ),
    "vllm.v1.engine.output_processor": ("OutputProcessor.abort_requests",),
    "vllm.entrypoints.generate.base.serving": (
        "GenerateBaseServing._convert_generation_error_to_streaming_response",
        "GenerateBaseServing.create_streaming_error_response",
    ),
    "vllm.entrypoints.openai.models.serving": (
        "OpenAIServingModels.resolve_lora",
        "OpenAIServingModels.unload_lora_adapter",
    ),
    "vllm.renderers.base": (
        "BaseRenderer.default_cmpl_tok_params",
        "BaseRenderer.default_chat_tok_params",
    ),
    "vllm.entrypoints.openai.responses.serving": (
        "OpenAIServingResponses._generate_with_builtin_tools",
        "OpenAIServingResponses._convert_generation_error_to_streaming_response",
        "OpenAIServingResponses._run_background_request",
        "OpenAIServingResponses.responses_background_stream_generator",
        "OpenAIServingResponses.responses_stream_generator",
        "OpenAIServingResponses.create_error_response",
    ),
    "vllm.entrypoints.anthropic.serving": ("AnthropicServingMessages.message_stream_converter",),
    "vllm.v1.engine.input_processor": ("InputProcessor.process_inputs",),
    "vllm.envs": ("enable_envs_cache",),
    "vllm.sampling_params": tuple(f"SamplingParams:{name}" for name in sorted(migration.TOUCHED)),
}


def missing(names: Names = NAMES) -> list[str]:
    """Return the names that the installed vLLM does not have. Imports its modules."""
    return [
        f"{module}.{path}"
        for module, paths in names.items()
        for path in paths
        if not _has(import_module(module), path)
    ]


def _has(owner: object, path: str) -> bool:
    attributes, _, field = path.partition(":")
    for part in attributes.split("."):
        owner = getattr(owner, part, None)
    fields = getattr(owner, "__struct_fields__", getattr(owner, "__dataclass_fields__", ()))
    return owner is not None and (not field or field in fields)
