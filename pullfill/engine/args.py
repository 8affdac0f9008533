"""Turns vLLM's own command-line flags into a VllmConfig with our connector.

Flags that cannot work here are refused in one line, before vLLM loads a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pullfill.config import NO_DATA_PARALLEL, ranks_of
from pullfill.engine.groups import BESIDE_TIER
from pullfill.engine.speculation import STATES_ON_CPU
from pullfill.errors import ConfigError, NotNow, PullfillError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ROTARY = "rotary_embedding"
_OF_VALUES = ValueError | TypeError | LookupError | AttributeError | NotImplementedError
# Characters of a message of argparse. Some list every choice.
_LONGEST = 500
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def build_config(
    model: str,
    vllm_args: Sequence[str],
    *,
    kv_role: str,
    engine_id: str,
) -> VllmConfig:
    """Parse `vllm_args` and return the config.

    kv_role: vLLM's word for its direction.
    engine_id: the instance id. Each rank's process knows it by this.

    Raises ConfigError naming what is wrong with the flags or the model path.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    parser = AsyncEngineArgs.add_cli_args(flag_parser("pullfill"))
    with flags_read():
        namespace = parser.parse_args(["--model", model, *vllm_args])
    with model_read(model):
        args = AsyncEngineArgs.from_cli_args(namespace)
    # Also from a --config file, which the command line does not show.
    if args.data_parallel_size > 1:
        raise ConfigError(f"data_parallel_size is {args.data_parallel_size}: {NO_DATA_PARALLEL}")
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size)
    if math.prod(sizes) != ranks_of(vllm_args):
        # Our launcher read the flags only: it counted GPUs and cores by them.
        raise ConfigError(
            "tensor_parallel_size is {} and pipeline_parallel_size {}, but not by flags: give them "
            "as --tensor-parallel-size and --pipeline-parallel-size, not in --config".format(*sizes)
        )
    device = current_platform.device_type
    check_flags(args, args, device, os.environ)
    offloading = take_offloading(args, device)
    ours: dict[str, Any] = {
        "kv_connector": "WorkerConnector",
        "kv_connector_module_path": "pullfill.worker.connector",
        "kv_role": kv_role,
    }
    if offloading is not None:
        ours = beside(ours, offloading)
    args.kv_transfer_config = KVTransferConfig(
        **ours, engine_id=engine_id, kv_load_failure_policy="recompute"
    )
    if args.async_scheduling is None:
        # With it, a step is under way whenever there are requests: docs/decisions.md, 47.
        args.async_scheduling = False
    if args.worker_cls == "auto" and device == "cpu":
        # Else a seeded request ends the engine at the first chunk of its prompt.
        args.worker_cls = "pullfill.engine.cpu_worker.SeededCPUWorker"
    args.mm_processor_cache_gb = 0  # frontends run the processor
    args.served_model_name = args.served_model_name or model  # offline, vLLM names its own copy
    with model_read(model):
        config = args.create_engine_config()
    check_config(config, offloads=offloading is not None)
    if device == "cpu":
        _rotate_parts_of_heads_natively(config)
    schedule_whole_prompts(config)
    return config


def flag_parser(program: str) -> Any:
    """Return a parser of vLLM's that does not end the process. Use it inside `flags_read`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise ValueError(message)

    return Parser(prog=program, exit_on_error=False)


@contextmanager
def flags_read() -> Iterator[None]:
    """Turn what vLLM's parser raises into one line. Raises ConfigError."""
    try:
        yield
    except Exception as exc:  # argparse's, of the YAML reader, and several kinds of vLLM's own
        kind = NotNow if isinstance(exc, OSError) else ConfigError
        why = " ".join(str(exc).split())[:_LONGEST]
        raise kind(f"vLLM does not accept these flags: {why or type(exc).__name__}") from exc


@contextmanager
def model_read(model: str) -> Iterator[None]:
    """Turn what vLLM raises while it looks up a model, and checks flags against it, into one line.

    Raises ConfigError if the flags are wrong, else NotNow: files or a hub cannot be read, or there
    is no memory."""
    try:
        yield
    except PullfillError:
        raise
    except Exception as exc:
        kind = ConfigError if _of_flags(exc) else NotNow
        raise kind(f"cannot load model {model!r}: {first_line(exc)}") from exc


def _of_flags(exc: BaseException) -> bool:
    """Whether vLLM has refused a value. It wraps failures to read a file or a hub in ValueError."""
    causes: list[BaseException | None] = [exc]
    for cause in causes:
        if isinstance(cause, OSError) or not isinstance(cause, _OF_VALUES | None):
            return False
        if cause is not None:
            causes.append(cause.__cause__ or cause.__context__)
            details = getattr(cause, "errors", None)  # pydantic's
            told = details() if callable(details) else ()
            causes += [each.get("ctx", {}).get("error") for each in told]
    return True


def first_line(exc: BaseException) -> str:
    """What an error of vLLM says, in one line."""
    # pydantic's first line only counts the errors. The reason is in the first of them.
    details = getattr(exc, "errors", None)
    text = str(details()[0]["msg"] if callable(details) else exc).strip()
    return text.splitlines()[0] if text else type(exc).__name__


def check_flags(model: Any, parallel: Any, device_type: str, env: Mapping[str, str]) -> None:
    """model, parallel: vLLM's ModelConfig and ParallelConfig. Or both are its EngineArgs.
    device_type: of vLLM's platform, "" if it found no device.

    Raises ConfigError, one line that says what to do.
    """
    if not device_type:
        raise NotNow(
            "vLLM's CUDA build is installed, but finds no NVIDIA driver with a GPU: make "
            "`nvidia-smi` work, or install the CPU build with PULLFILL_DEVICE=cpu make install"
        )
    for name in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(model, name):
            # Sleeping unmaps KV memory under the copies of other workers. CUDA IPC cannot export
            # memory of that allocator.
            raise ConfigError(
                f"--{name.replace('_', '-')}: its memory cannot be shared with other workers; "
                "remove the flag"
            )
    if (
        device_type == "cpu"
        and parallel.enable_expert_parallel
        and parallel.tensor_parallel_size > 1
    ):
        # `cpu_fused_moe` of vLLM dies (SIGSEGV) at the first request on a rank that holds a part of
        # the experts. Then the request would end the next worker.
        raise ConfigError(
            "--enable-expert-parallel: vLLM's CPU build cannot do this with several ranks; remove "
            "the flag, or --tensor-parallel-size"
        )
    if device_type != "cuda":
        return
    for name in _ALLOCATOR:
        if "expandable_segments:true" in env.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"{name} has expandable_segments:True: such memory cannot be shared with other "
                "workers; remove it"
            )


def check_config(config: Any, *, offloads: bool = False) -> None:
    """config: vLLM's VllmConfig. offloads: whether vLLM offloads KV.

    Raises ConfigError, one line that says what to do."""
    if offloads and not config.cache_config.enable_prefix_caching:
        # Where vLLM cannot compute the rest of a prompt, it cannot after a load either.
        raise ConfigError(
            "KV offloading needs vLLM's prefix caching, which is off, by a flag or because vLLM "
            "has none for this model: leave out KV offloading"
        )
    kept = str(config.cache_config.cache_dtype)
    if kept.endswith("per_token_head"):
        # `_ensure_scale_caches` in vLLM's triton_attn.py.
        raise ConfigError(
            f"--kv-cache-dtype {kept}: vLLM sets the scales of all blocks to 1 when it first "
            "computes attention, also of KV that another worker has written; use fp8"
        )
    speculates = config.speculative_config is not None
    on_cpu = config.device_config.device_type == "cpu"
    if speculates and on_cpu and config.model_config.has_inner_state:
        # `causal_conv1d_update_cpu` is not told how many drafts were accepted, so rejected ones
        # stay in the state. With a prefix cache of states it would need Triton.
        raise ConfigError(f"--speculative-config: {STATES_ON_CPU}; leave it out")


def take_offloading(args: Any, device_type: str) -> dict[str, Any] | None:
    """Take the flags for vLLM's own KV offloading, a second KV cache, out of vLLM's EngineArgs.

    Returns settings of vLLM's OffloadingConnector. None: KV is not offloaded. Raises ConfigError,
    one line that says what to do.

    device_type: of vLLM's platform."""
    if args.kv_transfer_config is not None:
        raise ConfigError(
            "--kv-transfer-config: pullfill adds its connector itself; leave it out. To keep more "
            "KV in CPU memory use --kv-offloading-size"
        )
    size, args.kv_offloading_size = args.kv_offloading_size, None
    if size is None:
        return None
    if size <= 0:
        raise ConfigError("KV offloading needs memory: give --kv-offloading-size a number above 0")
    if args.kv_offloading_backend != "native":
        raise ConfigError(
            "pullfill runs beside vLLM's OffloadingConnector only: leave out "
            "--kv-offloading-backend"
        )
    settings = {"cpu_bytes_to_use": size * (1 << 30)}
    if device_type == "cpu":
        settings |= {"spec_name": "HostSpec", "spec_module_path": "pullfill.engine.tier"}
    return settings


def beside(ours: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return fields of vLLM's KVTransferConfig for both connectors.

    vLLM would replace ours by its OffloadingConnector. Here both become children of vLLM's
    MultiConnector, ours first (tier.py says what the two tell each other).

    ours: the same for ours alone. settings: of `take_offloading`."""
    tier = {
        "kv_connector": "Tier",
        "kv_connector_module_path": "pullfill.engine.tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    ours = {**ours, "kv_connector_extra_config": {BESIDE_TIER: True}}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": ours["kv_role"],
        "kv_connector_extra_config": {"connectors": [ours, tier]},
    }


def schedule_whole_prompts(config: Any) -> None:
    """Let a step take any prompt, where vLLM does not compute prompts in chunks.

    config: vLLM's VllmConfig."""
    # vLLM's CPU platform turns chunks off for MLA, and raises max_num_batched_tokens to the longest
    # prompt. With speculation vLLM has by then kept the smaller number as max_num_scheduled_tokens.
    # A prompt longer than that was never scheduled.
    steps = config.scheduler_config
    most = steps.max_num_scheduled_tokens
    if not steps.enable_chunked_prefill and most is not None:
        steps.max_num_scheduled_tokens = max(most, steps.max_num_batched_tokens)


def _rotate_parts_of_heads_natively(config: VllmConfig) -> None:
    """Turn off vLLM's CPU kernel for rotary embeddings where a model rotates a part of each head.

    DeepSeek and other models with MLA do. A user who names the kernel in --compilation-config keeps
    the user's choice."""
    # That kernel reads the wrong stride of such a tensor, so it rotates the wrong rows, and which
    # rows depends on the number of tokens in the step. A prompt in one step and the same prompt in
    # two steps then get different answers. vLLM's other implementation, in PyTorch, is right. A
    # compiled engine uses it anyway.
    chosen = config.compilation_config.custom_ops
    partial = getattr(config.model_config.hf_text_config, "qk_rope_head_dim", None)
    if partial and f"+{_ROTARY}" not in chosen and f"-{_ROTARY}" not in chosen:
        chosen.append(f"-{_ROTARY}")
