"""Names of vLLM that unit tests fake: here they are vLLM's own. No engine is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.args import build_config
from pullfill.engine.attention import of_rank
from pullfill.engine.kv import device_of, executor_without_model
from pullfill.errors import ConfigError
from tests.support.late import Late

torch: Any = Late("torch")


def test_flags_and_the_platform_are_looked_at_before_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    def build(*flags: str) -> Any:
        return build_config(
            str(tmp_path), flags, connector="c", module="m", kv_role="kv_both", engine_id="e"
        )

    with pytest.raises(ConfigError, match="--enable-sleep-mode: its memory"):
        build("--enable-sleep-mode")
    with pytest.raises(ConfigError, match="--enable-cumem-allocator: its memory"):
        build("--enable-cumem-allocator")
    monkeypatch.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        build()


def test_kv_scales_are_where_vllm_keeps_them() -> None:
    """They are private to vLLM's layers, and a layer without them counts as unscaled."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer: Any = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: "A")
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"l": layer})
    )
    assert of_rank(config, ["l"]).scales == {"l": ([1.0], [1.0])}


def test_vllms_flag_names_the_mock_and_the_mock_has_no_model() -> None:
    named = "pullfill.testing.mock_executor.MockExecutor"
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=named),
        additional_config={"mock": {"device": "cuda"}},
    )
    assert executor_without_model(config).KV_KIND == "mock"
    assert device_of(config) == "cuda"


def test_the_mock_needs_no_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the connector has none. `meta` stands for the GPU: a device without memory."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from pullfill.testing import mock_executor

    registered: dict[str, Any] = {}
    connector = SimpleNamespace(
        get_mem_pool_context=lambda: None, register_kv_caches=registered.update
    )
    monkeypatch.setattr(KVConnectorFactory, "create_connector", lambda **_: connector)
    monkeypatch.setattr(mock_executor, "device_of", lambda config: "meta")
    made = mock_executor.MockExecutor.__new__(mock_executor.MockExecutor)
    made.vllm_config = SimpleNamespace(kv_transfer_config=object())
    spec = SimpleNamespace(block_size=16, head_size=8, num_kv_heads=1, dtype=torch.bfloat16)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
    made.initialize_from_config([SimpleNamespace(kv_cache_groups=[group], num_blocks=3)])
    assert {name: (t.device.type, t.shape) for name, t in registered.items()} == {
        name: ("meta", (3, 1, 16, 16)) for name in ("a", "b")
    }
