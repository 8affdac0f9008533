"""The members of vLLM's classes that pullfill reaches through objects of type Any.

The source does not show the class of such an object. So these members are listed here by hand.
`doctor --vllm` compares them with another release, like the names that `uses` finds. A worker that
starts checks only the names in check.py.
"""

from __future__ import annotations

REACHED = {
    "vllm.config.attention.AttentionConfig": "backend",
    "vllm.config.cache.CacheConfig": (
        "block_size cache_dtype enable_prefix_caching kv_cache_memory_bytes mamba_cache_mode "
        "num_gpu_blocks"
    ),
    "vllm.config.compilation.CompilationConfig": "backend custom_ops mode",
    "vllm.config.device.DeviceConfig": "device_type",
    "vllm.config.kv_transfer.KVTransferConfig": ("kv_connector kv_connector_extra_config kv_role"),
    "vllm.config.model.ModelConfig": (
        "dtype get_multimodal_config get_total_num_kv_heads get_vocab_size has_inner_state "
        "hf_config hf_text_config max_model_len model quantization revision runner_type "
        "supports_multimodal_inputs use_mla"
    ),
    "vllm.config.observability.ObservabilityConfig": "otlp_traces_endpoint",
    "vllm.config.parallel.ParallelConfig": (
        "decode_context_parallel_size distributed_executor_backend enable_expert_parallel "
        "pipeline_parallel_size prefill_context_parallel_size rank tensor_parallel_size world_size"
    ),
    "vllm.config.scheduler.SchedulerConfig": (
        "enable_chunked_prefill long_prefill_token_threshold max_num_batched_tokens max_num_seqs "
        "max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens stream_interval"
    ),
    "vllm.config.speculative.SpeculativeConfig": "method num_speculative_tokens",
    "vllm.config.vllm.VllmConfig": (
        "additional_config attention_config cache_config compilation_config device_config "
        "kv_events_config kv_transfer_config lora_config model_config observability_config "
        "parallel_config scheduler_config speculative_config watermark_config"
    ),
    "vllm.config.kv_events.KVEventsConfig": "enable_kv_cache_events publisher",
    "vllm.distributed.kv_events.BlockStored": (
        "block_hashes block_size extra_keys group_idx lora_name medium parent_block_hash token_ids"
    ),
    "vllm.distributed.kv_events.EventPublisher": "get_publisher_config publish shutdown",
    "vllm.distributed.kv_events.KVEventBatch": "events",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1": (
        "bind_connector_metadata clear_connector_metadata"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": (
        "finished_recving finished_sending"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector": (
        "sub_connectors"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler."
    "OffloadingConnectorScheduler": "_current_batch_allocated_block_ids",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorStats": "reduce",
    "vllm.engine.arg_utils.AsyncEngineArgs": (
        "async_scheduling create_engine_config create_model_config create_observability_config "
        "create_speculative_config "
        "create_structured_outputs_config data_parallel_size disable_log_stats "
        "enable_cumem_allocator enable_log_requests enable_lora enable_sleep_mode "
        "enable_return_routed_experts kv_offloading_backend kv_offloading_size kv_transfer_config "
        "logits_processors mm_processor_cache_gb "
        "reasoning_parser reasoning_parser_plugin scheduling_policy served_model_name "
        "structured_outputs_config worker_cls"
    ),
    "vllm.entrypoints.launchers.cli_args.FrontendArgs": (
        "allow_credentials allowed_headers allowed_methods allowed_origins api_key "
        "disable_uvicorn_access_log root_path ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers "
        "ssl_keyfile uvicorn_log_level"
    ),
    "vllm.entrypoints.openai.responses.serving.OpenAIServingResponses": (
        "enable_store msg_store response_store use_harmony"
    ),
    "vllm.entrypoints.openai.models.serving.OpenAIServingModels": (
        "load_lora_adapter lora_requests"
    ),
    "vllm.lora.request.LoRARequest": (
        "is_3d_lora_weight load_inplace lora_int_id lora_name lora_path"
    ),
    "vllm.model_executor.layers.attention.attention.Attention": "impl",
    "vllm.sampling_params.SamplingParams": (
        "bad_words_token_ids extra_args logit_bias min_p output_kind prompt_logprobs"
    ),
    "vllm.sampling_params.StructuredOutputsParams": "choice grammar json regex structural_tag",
    "vllm.v1.attention.backend.AttentionLayer": "_k_scale _v_scale",
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": "do_kv_cache_update",
    "vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl": (
        "do_kv_cache_update kv_cache_dtype kv_lora_rank"
    ),
    "vllm.v1.core.block_pool.BlockHashToBlockMap": "get_one_block",
    "vllm.v1.core.block_pool.BlockPool": (
        "blocks cached_block_hash_to_block enable_caching get_cached_block get_num_free_blocks "
        "hash_block_size kv_event_queue num_gpu_blocks"
    ),
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "single_type_managers",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": "get_block_ids",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": (
        "block_pool coordinator get_blocks take_events"
    ),
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_id",
    "vllm.v1.core.sched.output.CachedRequestData": "num_computed_tokens req_ids",
    "vllm.v1.core.sched.output.NewRequestData": ("num_computed_tokens prefill_token_ids req_id"),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "finished_req_ids kv_connector_metadata num_scheduled_tokens scheduled_cached_reqs "
        "scheduled_new_reqs total_num_scheduled_tokens"
    ),
    "vllm.v1.core.sched.request_queue.RequestQueue": "peek_request",
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "_inflight_prefills connector finished_recving_kv_req_ids kv_cache_config "
        "kv_cache_manager kv_event_publisher max_num_scheduled_tokens num_spec_tokens requests "
        "running schedule scheduler_config waiting"
    ),
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "block_size",
    "vllm.v1.engine.EngineCoreOutput": "events new_logprobs request_id stop_reason",
    "vllm.v1.engine.EngineCoreOutputs": (
        "finished_requests outputs start_wave timestamp wave_complete"
    ),
    "vllm.v1.engine.EngineCoreRequest": (
        "lora_request mm_features pooling_params prompt_embeds prompt_token_ids"
    ),
    "vllm.v1.engine.UtilityOutput": "call_id result",
    "vllm.v1.engine.async_llm.AsyncLLM": (
        "get_supported_tasks logger_manager model_config output_handler output_processor renderer "
        "shutdown"
    ),
    "vllm.v1.engine.core.EngineCore": (
        "batch_queue model_executor request_block_hasher scheduler step_fn "
        "structured_output_manager vllm_config"
    ),
    "vllm.v1.engine.output_processor.OutputProcessor": "has_unfinished_requests request_states",
    "vllm.v1.engine.output_processor.RequestState": "parent_req queue",
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": "workers",
    "vllm.v1.kv_cache_interface.FullAttentionSpec": (
        "attention_chunk_size block_size dtype head_size num_kv_heads page_size_bytes "
        "sliding_window"
    ),
    "vllm.v1.kv_cache_interface.KVCacheConfig": "kv_cache_groups num_blocks",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface.MambaSpec": (
        "dtypes mamba_cache_mode mamba_type num_speculative_blocks shapes"
    ),
    "vllm.v1.metrics.loggers.StatLoggerManager": "stat_loggers",
    "vllm.v1.metrics.stats.IterationStats": "num_generation_tokens",
    "vllm.v1.metrics.stats.PrefillStats": "num_cached_tokens num_external_cached_tokens",
    "vllm.v1.metrics.stats.PrefixCacheStats": (
        "hits hits_by_source preempted_hits preempted_queries preempted_requests queries requests "
        "reset"
    ),
    "vllm.v1.metrics.stats.SchedulerStats": (
        "connector_prefix_cache_stats kv_cache_usage num_running_reqs num_skipped_waiting_reqs "
        "num_waiting_reqs prefix_cache_stats"
    ),
    "vllm.v1.outputs.LogprobsLists": "logprob_token_ids logprobs",
    "vllm.v1.request.Request": (
        "_all_token_ids _block_hasher arrival_time block_hashes cache_salt kv_transfer_params "
        "lora_request "
        "mm_features num_computed_tokens num_output_tokens num_preemptions num_prompt_tokens "
        "num_tokens pooling_params prefill_stats priority prompt_embeds prompt_token_ids "
        "request_id sampling_params skip_reading_prefix_cache status structured_output_request "
        "trace_headers"
    ),
    "vllm.v1.request.RequestStatus": "PREEMPTED WAITING is_finished",
    "vllm.v1.structured_output.StructuredOutputManager": "executor",
    "vllm.v1.structured_output.request.StructuredOutputRequest": "grammar",
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": "generator",
    "vllm.v1.spec_decode.ngram_proposer.NgramProposer": "propose",
    "vllm.v1.worker.gpu_input_batch.InputBatch": (
        "generators num_tokens_no_spec req_ids token_ids_cpu"
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "drafter input_batch requests",
    "vllm.v1.worker.worker_base.WorkerBase": "model_runner remove_lora",
}
"""By class, with its module: members, separated by spaces."""
