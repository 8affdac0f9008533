"""Flags of vLLM's own KV offloading: what becomes a connector beside ours, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.args import check_config, take_offloading
from pullfill.errors import ConfigError


def args(**given: Any) -> Any:
    """vLLM's EngineArgs."""
    fields = {
        "kv_transfer_config": None, "kv_offloading_size": None, "kv_offloading_backend": "native",
    }  # fmt: skip
    return SimpleNamespace(**fields | given)


def test_its_memory_is_copied_by_us_without_a_gpu_only() -> None:
    for device, more in (
        ("cuda", {}),
        ("cpu", {"spec_name": "HostSpec", "spec_module_path": "pullfill.engine.tier"}),
    ):
        given = args(kv_offloading_size=0.5)
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
def test_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        take_offloading(args(**given), "cpu")
    assert "\n" not in str(refused.value)


def test_refused_where_vllm_has_no_prefix_cache() -> None:
    for caches in (True, False):
        kept = SimpleNamespace(enable_prefix_caching=caches, cache_dtype="auto")
        config = SimpleNamespace(cache_config=kept)
        with nullcontext() if caches else pytest.raises(ConfigError, match="which is off"):
            check_config(config, offloads=True)
