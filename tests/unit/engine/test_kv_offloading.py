"""Flags of vLLM's own KV offloading: what becomes a connector beside ours, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import kv_offloading, release
from pullfill.errors import ConfigError

DISK = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20}


def args(given: dict[str, Any] | None = None, **changes: Any) -> Any:
    """vLLM's EngineArgs. given: settings of a connector in --kv-transfer-config."""
    name = changes.pop("connector", "OffloadingConnector")
    config = given is not None and SimpleNamespace(
        kv_connector=name, kv_connector_extra_config=given
    )
    fields = {"kv_offloading_size": None, "kv_offloading_backend": "native", "enable_lora": False}
    return SimpleNamespace(**fields | {"kv_transfer_config": config or None} | changes)


def test_refused_with_a_release_that_it_was_not_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "this", release.of("0.30.0"))
    with pytest.raises(ConfigError, match=r"is not tested with vLLM .*: leave it out"):
        kv_offloading.take(args(kv_offloading_size=1.0), "cpu")
    assert kv_offloading.take(args(), "cpu") is None


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "this", release.of("0.31.0"))


@pytest.mark.usefixtures("tried")
def test_its_memory_is_copied_by_us_without_a_gpu_only() -> None:
    for device, more in (
        ("cuda", {}),
        ("cpu", {"spec_name": "HostSpec", "spec_module_path": "pullfill.engine.tier"}),
    ):
        given = args(kv_offloading_size=0.5)
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
        (args({}, connector="NixlConnector"), "may name vLLM's OffloadingConnector only"),
        (args({}, kv_offloading_size=1.0), "not beside --kv-offloading-size"),
        (args(kv_offloading_size=1.0, kv_offloading_backend="lmcache"), "leave out --kv-off"),
        (args(kv_offloading_size=0.0), "a number above 0"),
        (args({"cpu_bytes_to_use": "1"}), "a number above 0"),
        (args({}), "a number above 0"),
        (args({"spec_name": "Mine", "spec_module_path": "m"}), "spec_name may be one of"),
        (args({"spec_module_path": "m"}), "spec_name may be one of"),
        (args(DISK | {"secondary_tiers": [{"type": "p2p"}]}), "type fs only"),
        (args(DISK | {"secondary_tiers": [{"type": "fs"}]}), "root_dir"),
        (args(DISK | {"secondary_tiers": "fs"}), "type fs only"),
        (
            args(DISK | {"secondary_tiers": [{"type": "fs", "root_dir": "/"}]}, enable_lora=True),
            "--enable-lora",
        ),
        (args(DISK | {"canonical_layout": True}), "needs a GPU"),
        (args(DISK | {"block_size": 64}), "leave out block_size"),
        (args(DISK | {"blocks_per_chunk": 2}), "leave out block_size"),
    ],
)
@pytest.mark.usefixtures("tried")
def test_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        kv_offloading.take(given, "cpu")
    assert "\n" not in str(refused.value)


def config_with(settings: dict[str, Any], *, caches: bool = True, ranks: int = 1) -> Any:
    """vLLM's VllmConfig."""
    ours = {"kv_connector": "Ours", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    fields = kv_offloading.beside(ours, settings)
    extra = fields["kv_connector_extra_config"]
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
        parallel_config=SimpleNamespace(world_size=ranks),
    )


def test_each_kind_of_kv_has_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_offloading.compat, "stored_kv", lambda _config: "f00d")
    tiers = [{"type": "fs", "root_dir": "/kv"}]
    kv_offloading.complete(config_with({"secondary_tiers": tiers}))
    assert tiers == [{"type": "fs", "root_dir": "/kv/f00d"}]


def test_refused_where_vllm_has_no_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"prefix caching, which is off.*leave out"):
        kv_offloading.complete(config_with({"cpu_bytes_to_use": 1}, caches=False))
    alone = config_with({}, caches=False)
    alone.kv_transfer_config.kv_connector_extra_config = {"instance_id": "i"}
    kv_offloading.complete(alone)


def test_a_disk_is_refused_with_several_ranks() -> None:
    """With files that a prefill worker of one rank had written, two ranks gave wrong tokens."""
    tiers = [{"type": "fs", "root_dir": "/kv"}]
    with pytest.raises(ConfigError, match="one rank only: leave out secondary_tiers"):
        kv_offloading.complete(config_with({"secondary_tiers": tiers}, ranks=2))
    kv_offloading.complete(config_with({"cpu_bytes_to_use": 1}, ranks=2))
