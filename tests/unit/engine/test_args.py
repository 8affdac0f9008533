"""Refused engine settings get one line that names the setting and says what to do."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.args import (
    check_config,
    check_flags,
    model_read,
    schedule_whole_prompts,
    take_offloading,
)
from pullfill.errors import ConfigError

PLAIN = {
    "enable_sleep_mode": False,
    "enable_cumem_allocator": False,
    "enable_expert_parallel": False,
    "tensor_parallel_size": 2,
}


def check(flags: dict[str, Any], device: str, env: dict[str, str]) -> None:
    args = SimpleNamespace(**flags)
    check_flags(args, args, device, env)


@pytest.mark.parametrize(
    ("device", "flags", "env", "says"),
    [
        ("", {}, {}, "no NVIDIA driver.*nvidia-smi.*PULLFILL_DEVICE=cpu"),
        ("cuda", {"enable_sleep_mode": True}, {}, "--enable-sleep-mode.*remove"),
        ("cpu", {"enable_sleep_mode": True}, {}, "--enable-sleep-mode.*remove"),
        ("cpu", {"enable_expert_parallel": True}, {}, "--enable-expert-parallel.*remove"),
        ("cuda", {"enable_cumem_allocator": True}, {}, "--enable-cumem-allocator.*remove"),
        *(
            ("cuda", {}, {name: f"max_split_size_mb:9, expandable_segments:{value}"}, f"{name} has")
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            for value in ("True", "true")
        ),
    ],
)
def test_refused(device: str, flags: dict[str, Any], env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        check(PLAIN | flags, device, env)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("env", [{}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}])
def test_not_refused(env: dict[str, str]) -> None:
    experts = {"enable_expert_parallel": True}
    check(PLAIN | experts, "cuda", env)
    check(PLAIN | experts | {"tensor_parallel_size": 1}, "cpu", {})
    check(PLAIN, "cpu", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


class Wrapped(ValueError):
    """Stands in for an error of pydantic, which holds the error of vLLM's own check."""

    def errors(self) -> list[dict[str, Any]]:
        return [{"msg": "refused", "ctx": {"error": self.args[0]}}]


def caused(by: BaseException) -> Exception:
    """As of vLLM's `get_config`, which says that the model's name is wrong."""
    error = ValueError("Invalid repository ID\nPlease verify")
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("raised", "passes"),
    [
        (ValueError("max_model_len is too large"), False),
        (Wrapped(ValueError("refused")), False),
        (caused(KeyError("quantization")), False),
        (OSError(116, "Stale file handle"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (caused(ConnectionError("the hub does not answer")), True),
        (Wrapped(caused(ConnectionError("the hub does not answer"))), True),
    ],
)
def test_only_refused_values_are_mistakes(raised: Exception, passes: bool) -> None:
    """systemd does not start a process again that ends with a mistake."""
    with pytest.raises(ConfigError, match="cannot load model 'm': ") as told, model_read("m"):
        raise raised
    assert told.value.retryable == passes
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("kept", "caches", "device", "says"),
    [
        ("auto", True, "cuda", ""),
        ("fp8", True, "cuda", ""),
        ("int8_per_token_head", True, "cuda", r"--kv-cache-dtype int8_per_token_head: .*use fp8"),
        ("auto", False, "cuda", "KV offloading needs vLLM's prefix caching, which is off"),
        ("auto", True, "cpu", "Mamba or linear attention; leave it out"),
    ],
)
def test_caches_that_cannot_be_shared_or_offloaded_and_states_that_drafts_spoil(
    kept: str, caches: bool, device: str, says: str
) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caches, cache_dtype=kept),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(has_inner_state=True), speculative_config=object(),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_config(config, offloads=True)


def offloading(**given: Any) -> Any:
    """vLLM's EngineArgs."""
    fields = {"kv_transfer_config": None, "kv_offloading_backend": "native"}
    return SimpleNamespace(**fields | given)


@pytest.mark.parametrize(
    ("device", "more"),
    [
        ("cuda", {}),
        ("cpu", {"spec_name": "HostSpec", "spec_module_path": "pullfill.engine.tier"}),
    ],
)
def test_offloaded_kv_is_copied_by_us_without_a_gpu_only(device: str, more: dict[str, Any]) -> None:
    given = offloading(kv_offloading_size=0.5)
    assert take_offloading(given, device) == {"cpu_bytes_to_use": 1 << 29, **more}
    assert given.kv_offloading_size is None, "vLLM would replace our connector"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_transfer_config": object()}, "adds its connector itself; leave it out"),
        ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "leave out --kv-off"),
        ({"kv_offloading_size": 0.0}, "a number above 0"),
    ],
)
def test_offloading_flags_that_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        take_offloading(offloading(**given), "cpu")


@pytest.mark.parametrize(
    ("chunks", "before", "after"), [(False, 512, 4096), (False, None, None), (True, 512, 512)]
)
def test_a_prompt_that_may_not_be_split_fits_into_a_step(
    chunks: bool, before: int | None, after: int | None
) -> None:
    steps = SimpleNamespace(
        enable_chunked_prefill=chunks, max_num_batched_tokens=4096, max_num_scheduled_tokens=before
    )
    schedule_whole_prompts(SimpleNamespace(scheduler_config=steps))
    assert steps.max_num_scheduled_tokens == after
