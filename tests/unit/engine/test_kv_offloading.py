"""Flags of vLLM's own KV offloading: what becomes a connector beside ours, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import kv_offloading, release
from pullfill.errors import ConfigError


def args(size: float | None = 0.5, backend: str = "native") -> Any:
    """vLLM's EngineArgs."""
    return SimpleNamespace(kv_offloading_size=size, kv_offloading_backend=backend)


def test_refused_with_a_release_that_it_was_not_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "this", release.of("0.30.0"))
    with pytest.raises(ConfigError, match=r"is not tested with vLLM .*: leave it out"):
        kv_offloading.take(args(), "cpu")
    assert kv_offloading.take(args(None), "cpu") is None


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "this", release.of("0.31.0"))


@pytest.mark.usefixtures("tried")
def test_its_memory_is_copied_by_us_without_a_gpu_only() -> None:
    for device, more in (
        ("cuda", {}),
        ("cpu", {"spec_name": "HostSpec", "spec_module_path": "pullfill.engine.host_tier"}),
    ):
        given = args()
        assert kv_offloading.take(given, device) == {"cpu_bytes_to_use": 1 << 29, **more}
        assert given.kv_offloading_size is None, "vLLM would replace our connector"


def test_our_connector_is_told_of_it() -> None:
    ours = {"kv_role": "kv_both", "kv_connector_extra_config": {"instance_id": "i"}}
    settings = kv_offloading.beside(ours, {})["kv_connector_extra_config"]
    assert settings["connectors"][0]["kv_connector_extra_config"] == {
        "instance_id": "i", "beside_tier": True,
    }  # fmt: skip
    assert ours["kv_connector_extra_config"] == {"instance_id": "i"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (args(backend="lmcache"), "--kv-offloading-backend lmcache: .* leave it out"),
        (args(0.0), "--kv-offloading-size 0.0: give a number"),
        (args(-1.0), "--kv-offloading-size -1.0: give a number"),
    ],
)
@pytest.mark.usefixtures("tried")
def test_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        kv_offloading.take(given, "cpu")
    assert "\n" not in str(refused.value)


def test_refused_where_vllm_has_no_prefix_cache() -> None:
    def config(caches: bool) -> Any:
        return SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caches))

    kv_offloading.check_model(config(True))
    with pytest.raises(ConfigError, match=r"prefix caching, which is off.*leave it out"):
        kv_offloading.check_model(config(False))
