"""What the KV of an executor without a model is called, and how layers store KV."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import compat
from pullfill.engine.kv import (
    NO_ATTENTION,
    UNSCALED,
    Attention,
    Geometry,
    attention_of_rank,
    executor_without_model,
    join_attention,
)
from tests.support.late import Late


class Invents:
    """An executor as vLLM's flag may name it: it computes no model."""

    KV_KIND = "invented"


class Computes:
    """One that somebody else wrote: it computes the model."""


BY_PATH = f"{Invents.__module__}.Invents"


def record_of(monkeypatch: pytest.MonkeyPatch, backend: Any, *, cpu: bool = True) -> Any:
    """The compatibility record of a worker with this executor; vLLM is asked for its names only."""
    platform = SimpleNamespace(is_cpu=lambda: cpu, device_type="cuda")
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "1"},
        "vllm.platforms": {"current_platform": platform},
    }
    for name, told in modules.items():
        module = ModuleType(name)
        module.__dict__.update(told)
        monkeypatch.setitem(sys.modules, name, module)
    model = SimpleNamespace(
        dtype="torch.float32",
        get_total_num_kv_heads=lambda: 1,
    )
    config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        parallel_config=SimpleNamespace(distributed_executor_backend=backend),
    )
    return compat.describe(config, "m", "f", Geometry(2, 512, "cpu"))


@pytest.mark.parametrize(("named", "cpu"), [(BY_PATH, True), (Invents, False)])
def test_a_worker_without_a_model_exchanges_nothing_with_one_that_has_it(
    monkeypatch: pytest.MonkeyPatch, named: Any, cpu: bool
) -> None:
    invented = record_of(monkeypatch, named, cpu=cpu)
    computed = record_of(monkeypatch, "uni", cpu=cpu)
    assert [field for field, *_ in invented.differs_from(computed)] == ["isa"]
    assert invented.hash() != computed.hash(), "so it does not even see the other's jobs"
    assert invented.isa == "invented"
    assert invented == record_of(monkeypatch, Invents)


def test_other_executors_compute_a_model() -> None:
    for backend in ("uni", None, Computes, f"{__name__}.Computes"):
        parallel = SimpleNamespace(distributed_executor_backend=backend)
        assert executor_without_model(SimpleNamespace(parallel_config=parallel)) is None


torch: Any = Late("torch")


def layer(k: Any, v: Any, backend: str = "FLASH_ATTN") -> SimpleNamespace:
    """An attention layer of vLLM, as it is once the weights are loaded."""
    kind = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(
        _k_scale=torch.tensor(k), _v_scale=torch.tensor(v), get_attn_backend=lambda: kind
    )


def joined(*ranks: dict[str, Any]) -> Attention:
    """What is told of ranks that have these layers."""
    told = []
    for layers in ranks:
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        told.append(attention_of_rank(config, [*layers, "shared.with.another"]))
    return join_attention(told)


def test_an_unscaled_cache_says_so_whatever_the_shape() -> None:
    assert joined({}) == Attention(NO_ATTENTION, UNSCALED)
    for ones in (1.0, [1.0] * 4):
        assert joined({"l": layer(ones, 1.0)}) == Attention("FLASH_ATTN", UNSCALED)


def test_other_scales_are_told_apart() -> None:
    scales = (0.25, 0.25), (0.5, 0.25), (0.25, 0.5), ([0.25, 0.5, 0.5, 0.5], 0.25)
    told = {joined({"l.0": layer(1.0, 1.0), "l.1": layer(*pair)}).scales for pair in scales}
    assert len(told - {UNSCALED}) == len(scales)
    assert all(len(digest) == 16 for digest in told)
