"""Small random checkpoints of the architectures that people serve."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pullfill.engine.check import require_version
from pullfill.engine.speculation import STATES_ON_CPU
from tests.support.checkpoint import IMAGE_ID, TINY, random_checkpoint, tiny_checkpoint

LATENT_BYTES = 16 * 4 * 576 * 4
"""A block of the small DeepSeek-V3: tokens, layers, numbers of the latent, bytes."""
WINDOW = 96
"""Tokens that a layer with a window sees: three blocks."""

_BASE: dict[str, object] = {
    "vocab_size": TINY.vocab,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
_SMALL: dict[str, object] = {
    **_BASE,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DEEPSEEK: dict[str, object] = {
    **_BASE,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    # As in DeepSeek's own files. Without it vLLM takes softmax, and transformers sigmoid.
    "scoring_func": "sigmoid",
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""DeepSeek-V3 in small. vLLM's CPU kernel for MLA takes only this kv_lora_rank and these head
dimensions."""
_NO_LORA = "vLLM's LoRA kernels for experts need Triton, which its CPU build lacks"
_WINDOW: dict[str, object] = {**_SMALL, "sliding_window": WINDOW}
_WINDOWS: dict[str, object] = {
    **_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2
}  # fmt: skip
_TOWER: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Model:
    """One architecture.

    config, model: names of classes of transformers. Empty: the tiny Llama.
    fields: of the config.
    groups: number of KV cache groups that vLLM makes of it.
    front: flags of the frontend, beyond those of `Cluster.launch`.
    plain: arguments of the plain engine.
    caches: whether vLLM's CPU build has a prefix cache for it.
    chunks: whether vLLM's CPU build may compute a prompt in several steps.
    flags: of the workers.
    decode: of the decode worker alone.
    lora: why it is not asked with a LoRA adapter. Empty: it is.
    speculation: why workers refuse to speculate. Empty: they do not.
    dtype: what vLLM's CPU build takes.
    processor: of images, as in `random_checkpoint`.
    missing: why the installed vLLM cannot load it. Empty: it can.
    local_with_flags: why the decode worker prefills its prompts, if a worker has two ranks or
    speculates. Empty: prefill workers do.
    block_bytes: KV bytes that one block takes on all decode ranks. 0: not looked at.
    mocked: the test that shows with mock engines, over vLLM's scheduler and its cache configuration
    for such a model, what the CPU build cannot compute. Empty: it computes all."""

    config: str = ""
    model: str = ""
    fields: dict[str, object] = field(default_factory=dict)
    groups: int = 1
    block_size: int = 32
    front: tuple[str, ...] = ()
    plain: dict[str, object] = field(default_factory=dict)
    caches: bool = True
    chunks: bool = True
    flags: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    lora: str = ""
    speculation: str = ""
    dtype: str = "float32"
    missing: str = ""
    processor: dict[str, object] | None = None
    local_with_flags: str = ""
    block_bytes: int = 0
    mocked: str = ""

    def checkpoint(self) -> Path:
        """Directory of the checkpoint, made unless it is there."""
        if not self.config:
            return tiny_checkpoint()
        return random_checkpoint(self.config, self.model, self.processor, **self.fields)


_FLAGS = Path("/proc/cpuinfo").read_text().split()
NO_FP8 = (
    ""
    if {"avx512f", "amx_tile"} & set(_FLAGS)
    else "for an fp8 KV cache on a CPU vLLM needs AVX-512 or AMX"
)
ZOO = {
    "Llama": Model(),
    "Llama, fp8 cache": Model(
        flags=("--kv-cache-dtype=fp8",), plain={"kv_cache_dtype": "fp8"}, missing=NO_FP8
    ),
    "Qwen3": Model("Qwen3Config", "Qwen3ForCausalLM", _SMALL),
    "Qwen3-MoE": Model(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_SMALL, **_EXPERTS, "num_experts": 4},
        lora=_NO_LORA,
    ),
    "DeepSeek-V3": Model(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK,
        block_size=16,
        # vLLM's CPU kernel rotates the wrong rows. Workers turn it off by themselves.
        caches=False,
        chunks=False,
        lora=_NO_LORA,
        plain={"compilation_config": {"custom_ops": ["-rotary_embedding"]}},
        block_bytes=LATENT_BYTES,
    ),
    "Gemma 3": Model(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_WINDOWS, "query_pre_attn_scalar": 32},
        groups=2,
    ),
    "gpt-oss": Model(
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
        groups=2,
        front=("--tool-call-parser=openai",),
        lora=_NO_LORA,
    ),
    "Mistral": Model("MistralConfig", "MistralForCausalLM", _WINDOW),
    "Phi-3": Model("Phi3Config", "Phi3ForCausalLM", _WINDOW),
    "BLIP-2, text": Model(
        "Blip2Config",
        "Blip2ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "opt",
                "vocab_size": TINY.vocab,
                "hidden_size": 128,
                "word_embed_proj_dim": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "ffn_dim": 256,
                "max_position_embeddings": 4096,
                "init_std": 0.2,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "vision_config": {**_TOWER, "image_size": 56, "patch_size": 14},
            "qformer_config": {**_TOWER, "encoder_hidden_size": 64, "vocab_size": TINY.vocab},
            "num_query_tokens": 40,
            "initializer_range": 0.3,
            "image_token_index": IMAGE_ID,
        },
        processor={
            "processor_class": "Blip2Processor",
            "num_query_tokens": 40,
            "image_processor": {
                "image_processor_type": "BlipImageProcessor",
                "size": {"height": 56, "width": 56},
            },
        },
    ),
    "Falcon-H1 (Mamba-2)": Model(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_SMALL,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
        groups=2,
        caches=False,
        # With a prefix cache vLLM's CPU kernel of Mamba-2 fails at the first prompt.
        flags=("--no-enable-prefix-caching",),
        local_with_flags="kv_groups",
        speculation=STATES_ON_CPU,
        missing="before 0.32, vLLM loads Mamba-2 in bfloat16 only on CPUs with AVX-512 BF16"
        if require_version().startswith("0.31.")
        else "",
        mocked="tests/integration/test_states.py",
    ),
    "Qwen3-Next": Model(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_SMALL,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            # vLLM makes a block of KV as large as a state: of 160 tokens here.
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        groups=4,
        caches=False,
        flags=("--no-enable-prefix-caching",),
        dtype="bfloat16",
        lora=_NO_LORA,
        local_with_flags="kv_groups",
        speculation=STATES_ON_CPU,
    ),
}
ZOO["Qwen3-Next, prefix cache"] = replace(
    ZOO["Qwen3-Next"],
    flags=("--enable-prefix-caching",),
    caches=True,
)
for _name in ("DeepSeek-V3", "Gemma 3", "Mistral"):
    # MLA has one latent cache for all heads: each decode rank gets a copy.
    ZOO[f"{_name}, decode on two ranks"] = replace(
        ZOO[_name],
        decode=("--tensor-parallel-size=2",),
        block_bytes=2 * ZOO[_name].block_bytes,
    )
