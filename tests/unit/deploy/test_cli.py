"""The command line: what it accepts, what it hands on, and how it says no."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pullfill.deploy import cli
from pullfill.errors import ConfigError, UnavailableError
from pullfill.options import UpOptions
from pullfill.runtime.log import DEBUG_ENV

COMMANDS = ("up", "down", "decode", "prefill", "frontend", "status", "drain", "explain", "doctor")
runner = CliRunner()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `up` was called with."""
    seen: dict[str, Any] = {}

    def up(options: UpOptions, state_dir: str | None, *, detach: bool) -> int:
        seen.update(options=options, state_dir=state_dir, detach=detach)
        return 0

    monkeypatch.setattr("pullfill.deploy.up.up", up)
    return seen


@pytest.fixture
def error(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """`down` fails with the error that a test puts here."""
    errors: list[Exception] = []

    def fail(*_: object, **__: object) -> int:
        raise errors[-1]

    monkeypatch.setattr("pullfill.deploy.down.down", fail)
    return errors


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    result = runner.invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "--state-dir" in result.output


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


def test_unknown_flags_of_up_go_to_vllm(given: dict[str, Any]) -> None:
    arguments = [
        "up",
        "--model",
        "/m",
        "--max-model-len",
        "512",
        "--decode",
        "2",
        "--enforce-eager",
    ]
    result = runner.invoke(cli.app, [*arguments, "--detach", "--seed=3", "--state-dir", "/s"])
    assert result.exit_code == 0, result.output
    options = given["options"]
    assert (options.model, options.decode, given["detach"]) == ("/m", 2, True)
    assert given["state_dir"] == "/s"
    assert options.vllm_args == ["--max-model-len", "512", "--enforce-eager", "--seed=3"]


def test_defaults_of_up(given: dict[str, Any], state_dir: Path) -> None:
    runner.invoke(cli.app, ["up"])
    options = given["options"]
    assert (options.model, options.decode, options.prefill, options.frontends) == ("demo", 1, 1, 1)
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert given["state_dir"] == str(state_dir)
    assert not given["detach"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--decode", "x"],
        ["up", "--prefill", "-1"],
        ["up", "--port", "70000"],
        ["nope"],
        ["drain"],
        ["status", "--nope"],
    ],
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
