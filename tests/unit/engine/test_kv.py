"""An executor that computes no model: what its KV is called, and where it lies."""

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
    RankAttention,
    attention_of_rank,
    device_of,
    executor_without_model,
    join_attention,
)
from tests.support.late import Late
from tests.support.workers import compat as record


class Invents:
    """An executor as vLLM's flag may name it: it computes no model."""

    KV_KIND = "invented"

    @staticmethod
    def kv_device(vllm_config: Any) -> str:
        return str(vllm_config.additional_config)


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
        assert executor_without_model(config_of(backend)) is None


def config_of(backend: Any, device: str = "auto") -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=backend),
        additional_config=device,
    )


@pytest.mark.parametrize("here", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("backend", "device", "found"),
    [
        (Invents, "auto", None),
        (BY_PATH, "cpu", "cpu"),
        (Invents, "cuda", "cuda"),
        ("uni", "cpu", None),
    ],
)
def test_where_the_kv_memory_is(
    monkeypatch: pytest.MonkeyPatch, backend: Any, device: str, found: str, here: str
) -> None:
    """None: where vLLM computes here."""
    platform = ModuleType("vllm.platforms")
    platform.__dict__["current_platform"] = SimpleNamespace(device_type=here)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    assert device_of(config_of(backend, device)) == (found or here)


torch: Any = Late("torch")

HEADS = 4


def layer(k: Any, v: Any, backend: str = "FLASH_ATTN") -> SimpleNamespace:
    """An attention layer of vLLM, as it is once the weights are loaded."""
    kind = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(
        _k_scale=torch.tensor(k), _v_scale=torch.tensor(v), get_attn_backend=lambda: kind
    )


def rank(layers: dict[str, Any]) -> RankAttention:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return attention_of_rank(config, [*layers, "shared.with.another"])


def alone(k: Any, v: Any, backend: str = "FLASH_ATTN") -> Attention:
    return join_attention(
        {(0, 0): rank({"l.0": layer(k, v, backend), "l.1": layer(k, v, backend)})}, HEADS
    )


def test_an_unscaled_cache_says_so_whatever_the_shape() -> None:
    assert join_attention({(0, 0): rank({})}, HEADS) == Attention(NO_ATTENTION, UNSCALED)
    assert alone(1.0, 1.0) == alone([1.0] * HEADS, [1.0]) == Attention("FLASH_ATTN", UNSCALED)


@pytest.mark.parametrize(("k", "v"), [(0.5, 0.25), (0.25, 0.5), ([0.25, 0.5, 0.5, 0.5], 0.25)])
def test_other_scales_are_told_apart(k: Any, v: Any) -> None:
    other = alone(k, v)
    assert other.scales != alone(0.25, 0.25).scales != UNSCALED
    assert len(other.scales) == 16


def test_backends_of_all_layers_count() -> None:
    mixed = {"l.0": layer(1.0, 1.0, "TRITON_ATTN"), "l.1": layer(1.0, 1.0, "FLASHINFER")}
    assert join_attention({(0, 0): rank(mixed)}, HEADS).backend == "FLASHINFER+TRITON_ATTN"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_split_model_has_the_scales_of_the_whole(tp: int) -> None:
    """Per tensor every rank has the same number; per head each has its own heads', and with more
    ranks than heads neighbours have the same head."""
    k, v = [0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]

    def mine(values: list[float], number: int) -> list[float]:
        count = max(1, HEADS // tp)
        first = number * HEADS // tp
        return values[first : first + count]

    split = {(0, n): rank({"l": layer(mine(k, n), mine(v, n))}) for n in range(tp)}
    assert join_attention(split, HEADS) == join_attention({(0, 0): rank({"l": layer(k, v)})}, HEADS)
    one = {(0, n): rank({"l": layer(0.5, 0.25)}) for n in range(tp)}
    assert join_attention(one, HEADS) == join_attention(
        {(0, 0): rank({"l": layer(0.5, 0.25)})}, HEADS
    )


def test_pipeline_stages_add_up() -> None:
    layers = {"l.0": layer(0.5, 0.5), "l.1": layer(0.25, 0.5)}
    stages = {(n, 0): rank({name: made}) for n, (name, made) in enumerate(layers.items())}
    other = layers | {"l.1": layer(0.25, 0.75)}
    assert join_attention(stages, HEADS) != join_attention({(0, 0): rank(other)}, HEADS)
    assert join_attention(stages, HEADS) == join_attention({(0, 0): rank(layers)}, HEADS)


@pytest.mark.parametrize(
    "change", [{"attention": "TRITON_ATTN"}, {"kv_scales": "0123456789abcdef"}]
)
def test_workers_that_differ_do_not_fit(change: dict[str, str]) -> None:
    assert [name for name, *_ in record().differs_from(record(**change))] == list(change)
    assert record().hash() != record(**change).hash()
