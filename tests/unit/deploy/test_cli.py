"""The command line: what it accepts, what it hands on, and how it says no."""

from __future__ import annotations

import errno
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
    ("raised", "code", "said"),
    [
        (ConfigError("no good"), 2, "no good"),
        (UnavailableError("no good"), 1, "no good"),
        (OSError(errno.ENOSPC, "full", "/f"), 1, "/f: full. Free some space"),
        (OSError(errno.EACCES, "no", "/f"), 1, "/f: no. Choose a directory you may write to"),
        (OSError(errno.EIO, "broken", "/f"), 1, f"/f: broken. {DEBUG_ENV}=1 shows where"),
    ],
)
def test_an_error_is_one_line_and_its_traceback_is_shown_on_demand(
    main: Callable[..., int],
    error: list[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: Exception,
    code: int,
    said: str,
) -> None:
    error.append(raised)
    monkeypatch.delenv(DEBUG_ENV, raising=False)
    assert main("down") == code
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}")
    assert told.count("\n") == 1
    monkeypatch.setenv(DEBUG_ENV, "")  # put back afterwards
    assert main("--debug", "down") == code
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
