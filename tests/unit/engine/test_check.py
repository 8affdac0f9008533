"""The installed vLLM: another version, or pickle, is refused."""

from __future__ import annotations

import re

import pytest

from pullfill import releases
from pullfill.engine import check
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
