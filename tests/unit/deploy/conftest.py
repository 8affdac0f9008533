"""Fixtures of the command line's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pullfill.deploy import cli


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs one command as the script does. Gives its exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pullfill", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    return run
