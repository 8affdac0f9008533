"""The installed vLLM: another version, or pickle, is refused. Each release has its class."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from pullfill import releases
from pullfill.engine import check, release
from pullfill.errors import IncompatibleError


@pytest.mark.essential
def test_another_vllm_is_refused_naming_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_builds", lambda: {"vllm": "0.99.1"})
    with pytest.raises(IncompatibleError, match=rf"0\.99\.1.*{re.escape(releases.VLLM)}"):
        check.require_version()
    monkeypatch.setattr(check, "installed_builds", dict)
    with pytest.raises(IncompatibleError, match=r"not installed.*make install"):
        check.require_version()
    for version in releases.TORCH:
        monkeypatch.setattr(check, "installed_builds", lambda: {"vllm": f"{version}+cpu"})  # noqa: B023
        assert check.require_version() == f"{version}+cpu"


def test_pickle_on_the_wire_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_builds", lambda: {"vllm": releases.VLLM})
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(IncompatibleError, match="pickle"):
        check.require_version()


def members(version: str) -> set[str]:
    return {name for name in dir(release.of(version)) if not name.startswith("_")}


@pytest.mark.parametrize("version", releases.TORCH)
def test_only_the_newest_release_adds_members(version: str) -> None:
    """So its class shows all that an older one may do in another way."""
    assert members(version) == members(releases.VLLM)


def test_there_is_no_class_without_a_release() -> None:
    assert len(release.CLASSES) == len({type(release.of(version)) for version in releases.TORCH})


@pytest.mark.parametrize("version", releases.TORCH)
@pytest.mark.parametrize("keys", [None, object()])
def test_an_engine_without_a_watermark_makes_none(version: str, keys: object | None) -> None:
    """Before 0.32, vLLM left its default True in all requests. Then none could migrate."""
    params = SimpleNamespace(watermarking=True)
    release.of(version).settle_watermark(params, SimpleNamespace(watermark_config=keys))
    assert params.watermarking is (keys is not None or version != "0.31.0")
