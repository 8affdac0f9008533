"""The vLLM internals that a worker's engine host and connectors rely on, checked at start-up."""

from __future__ import annotations

from pullfill.engine.check import require_names

_WORKER = {
    "vllm.v1.engine.core": (
        "EngineCore.step",
        "EngineCore.step_with_batch_queue",
        "EngineCore.post_step",
        "EngineCore.add_request",
        "EngineCore.abort_requests",
        "EngineCore.preprocess_add_request",
        "EngineCore.get_supported_tasks",
        "EngineCore.shutdown",
    ),
    "vllm.v1.engine": (
        "EngineCoreRequest:cache_salt",
        "EngineCoreRequest:client_index",
        "EngineCoreOutput:prefill_stats",
        "EngineCoreOutputs:utility_output",
        "UtilityOutput:failure_message",
        "FinishReason.ERROR",
    ),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.has_requests",
        "Scheduler.get_request_counts",
        "Scheduler._update_from_kv_xfer_finished",
        "Scheduler._handle_failed_recving",
    ),
    "vllm.v1.outputs": ("KVConnectorOutput:finished_recving",),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput:preempted_req_ids",
        "SchedulerOutput:num_scheduled_tokens",
    ),
    "vllm.v1.core.block_pool": (
        "BlockPool.touch",
        "BlockPool.free_blocks",
        "BlockPool.get_num_free_blocks",
    ),
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
    "vllm.config": ("CompilationConfig:static_forward_context",),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase.get_attn_backend",),
    "vllm.v1.attention.backend": ("AttentionBackend.get_name",),
    "vllm.v1.metrics.stats": ("PrefillStats:num_local_cached_tokens",),
    "vllm.v1.executor": ("Executor.get_class",),
    "vllm.v1.executor.multiproc_executor": ("WorkerProcHandle:proc", "WorkerProcHandle:rank"),
    "vllm.v1.worker.gpu_input_batch": ("CachedRequestState:generator", "InputBatch"),
    "vllm.v1.worker.worker_base": ("WorkerBase.sample_tokens",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorTransferResults:failed_recving",
        "KVConnectorBase_V1.get_mem_pool_context",
        "KVConnectorBase_V1.get_transfer_results",
        "KVConnectorBase_V1.bind_kv_cache_manager",
        "KVConnectorBase_V1.bind_gpu_block_pool",
        "KVConnectorBase_V1.has_pending_push_work",
        "KVConnectorBase_V1.get_handshake_metadata",
        "KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware",
        "KVConnectorHandshakeMetadata",
        "KVConnectorBase_V1.get_required_kvcache_layout",
    ),
}


def check_worker() -> None:
    """Imports vLLM. Raises IncompatibleError naming what is missing and both versions."""
    require_names(_WORKER)
