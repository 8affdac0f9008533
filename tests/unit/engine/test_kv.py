"""An executor that computes no model: what its KV is called, and where it lies."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import compat
from pullfill.engine.kv import Geometry, device_of, executor_without_model


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


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("named", [BY_PATH, Invents], ids=["path", "class"])
def test_a_worker_without_a_model_exchanges_nothing_with_one_that_has_it(
    monkeypatch: pytest.MonkeyPatch, named: Any, cpu: bool
) -> None:
    invented = record_of(monkeypatch, named, cpu=cpu)
    computed = record_of(monkeypatch, "uni", cpu=cpu)
    assert [field for field, *_ in invented.differs_from(computed)] == ["isa"]
    assert invented.hash() != computed.hash(), "so it does not even see the other's jobs"
    assert invented.isa == "invented"
    assert invented == record_of(monkeypatch, Invents)


@pytest.mark.parametrize("backend", ["uni", "mp", "ray", None, Computes, f"{__name__}.Computes"])
def test_other_executors_compute_a_model(backend: Any) -> None:
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
