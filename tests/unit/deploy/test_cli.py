"""The command line: what it accepts, what it hands on, and how it says no."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pullfill.errors import ConfigError, UnavailableError
from pullfill.runtime.log import DEBUG_ENV

runner = CliRunner()


@pytest.fixture
def error(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """`down` fails with the error that a test puts here."""
    errors: list[Exception] = []

    def fail(work: Coroutine[Any, Any, int]) -> int:
        work.close()
        raise errors[-1]

    monkeypatch.setattr("pullfill.deploy.cli.asyncio.run", fail)
    return errors


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pullfill.deploy import cli\n"
        "sys.argv = ['pullfill', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'vllm', 'torch', 'transformers', 'aiohttp', 'nats', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["up", "--decode", "x"], ["up", "--port", "70000"], ["nope"], ["drain"], ["status", "--nope"]],
)
def test_usage_errors_exit_2(main: Callable[..., int], arguments: list[str]) -> None:
    assert main(*arguments) == 2


@pytest.mark.parametrize(
    ("raised", "code"), [(ConfigError("no good"), 2), (UnavailableError("no good"), 1)]
)
def test_our_errors_are_one_line(
    main: Callable[..., int],
    error: list[Exception],
    capsys: pytest.CaptureFixture[str],
    raised: Exception,
    code: int,
) -> None:
    error.append(raised)
    assert main("down") == code
    assert capsys.readouterr().err == "error: no good\n"


def test_debug_shows_the_traceback(
    main: Callable[..., int],
    error: list[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error.append(ConfigError("no good"))
    monkeypatch.setenv(DEBUG_ENV, "")
    assert main("--debug", "down") == 2
    told = capsys.readouterr().err
    assert "in fail" in told
    assert told.endswith("\nerror: no good\n")


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "Free some space"), (errno.EACCES, "XDG_CACHE_HOME"), (errno.EIO, DEBUG_ENV)],
)
def test_what_the_system_refuses_is_one_line(
    main: Callable[..., int],
    error: list[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    advice: str,
) -> None:
    error.append(OSError(number, os.strerror(number), "/the/file"))
    monkeypatch.delenv(DEBUG_ENV, raising=False)
    assert main("down") == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: /the/file: {os.strerror(number)}. ")
    assert advice in told
    assert told.count("\n") == 1
    monkeypatch.setenv(DEBUG_ENV, "1")
    assert main("down") == 1
    assert "in fail" in capsys.readouterr().err


def test_no_cluster_is_told_plainly(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str], state_dir: Path
) -> None:
    for command in (["status"], ["explain", "x"], ["drain", "x"], ["config", "get"], ["prefill"]):
        assert main(*command) == 2
        assert str(state_dir) in capsys.readouterr().err
    assert main("down") == 0
    assert "nothing runs" in capsys.readouterr().out
    assert not state_dir.exists()
