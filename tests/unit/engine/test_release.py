"""The releases of vLLM: each has its module."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill import releases
from pullfill.engine import release


def members(version: str) -> set[str]:
    return {name for name in dir(release.of(version)) if not name.startswith("_")}


@pytest.mark.parametrize("version", releases.TORCH)
def test_only_the_newest_release_adds_members(version: str) -> None:
    """So its module shows all that an older one may do in another way."""
    assert members(version) == members(releases.VLLM)


def test_there_is_no_module_without_a_release() -> None:
    files = {file.stem for file in Path(release.__path__[0]).glob("v*.py")}
    assert files == {
        type(release.of(version)).__module__.rpartition(".")[2] for version in releases.TORCH
    }


@pytest.mark.parametrize("version", releases.TORCH)
@pytest.mark.parametrize("keys", [None, object()])
def test_an_engine_without_a_watermark_makes_none(version: str, keys: object | None) -> None:
    """Before 0.32, vLLM left its default True in all requests. Then none could migrate."""
    params = SimpleNamespace(watermarking=True)
    release.of(version).settle_watermark(params, SimpleNamespace(watermark_config=keys))
    assert params.watermarking is (keys is not None or version not in ("0.30.0", "0.31.0"))


def test_the_oldest_asks_our_connector_for_memory_also_beside_kv_offloading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.30 asks none of them, and its MultiConnector does not pass the question on."""
    pool = object()
    ours = SimpleNamespace(get_mem_pool_context=lambda: pool)
    for group in (ours, SimpleNamespace(sub_connectors=[ours, object()])):
        module: Any = SimpleNamespace(
            get_kv_transfer_group=lambda group=group: group, has_kv_transfer_group=lambda: True
        )
        for name in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer"):
            monkeypatch.setitem(sys.modules, name, module)
        assert release.of("0.30.0").memory_pool("kv_cache") is pool
        assert release.of("0.30.0").memory_pool("weights") is None
