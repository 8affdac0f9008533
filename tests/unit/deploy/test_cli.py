"""The command line: what it accepts, what the processes of a role are given, how it says no."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from pullfill.deploy import cli
from pullfill.errors import ConfigError, UnavailableError
from pullfill.options import WorkerOptions
from pullfill.runtime.log import DEBUG_ENV
from tests.support.state_dir import recorded


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs one command as the script does. Gives its exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pullfill", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    return run


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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: Exception,
    code: int,
    said: str,
) -> None:
    def fail(work: Coroutine[Any, Any, int]) -> int:
        work.close()
        raise raised

    monkeypatch.setattr("pullfill.deploy.cli.asyncio.run", fail)
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


runner = CliRunner()


class TestRoles:
    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What a role's `run` was called with. The environment is put back afterwards."""
        calls: list[Any] = []
        for name, first in (("worker.process", ()), ("frontend.main", ("frontend",))):
            main: Any = ModuleType(f"pullfill.{name}")
            main.run = lambda *given, first=first: calls.append((*first, *given)) or 7
            monkeypatch.setitem(sys.modules, main.__name__, main)
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        return calls

    def _cluster(self, directory: Path, model: Path) -> None:
        model.mkdir()
        (model / "config.json").write_text("{}")
        recorded(
            directory,
            model=str(model),
            engine_args=["--dtype=float32", "--api-key", "k"],
            role_args={"decode": ["-tp", "2"]},
        )

    def test_a_worker_by_hand_gets_the_clusters_model_and_flags(
        self, ran: list[Any], state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PULLFILL_DEVICE", "cpu")
        self._cluster(state_dir, tmp_path / "m")
        result = runner.invoke(cli.app, ["prefill", "--cpu", "0", "--seed", "1"])
        assert result.exit_code == 7, result.output
        ((role, ref, options, arguments),) = ran
        assert role == "prefill"
        assert (ref.namespace, ref.nats_url, ref.etcd_url) == ("n", "nats://h:1", "http://h:2")
        assert isinstance(options, WorkerOptions)
        assert (options.model, options.cores) == (str(tmp_path / "m"), (0,))
        assert arguments == ["--max-num-batched-tokens=1024", "--dtype=float32", "--seed", "1"]
        assert runner.invoke(cli.app, ["decode", "--seed", "1"]).exit_code == 7
        assert ran[1][3] == ["--dtype=float32", "-tp", "2", "--seed", "1"], "and those of its role"

    def test_a_taken_port_is_known_before_the_model_loads(
        self, ran: list[Any], state_dir: Path, tmp_path: Path
    ) -> None:
        self._cluster(state_dir, tmp_path / "m")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            result = runner.invoke(cli.app, ["decode", "--control-port", port])
        assert f"127.0.0.1:{port}" in str(result.exception)
        assert "another with --control-port" in str(result.exception)
        assert ran == []

    @pytest.mark.parametrize(
        ("host", "why"),
        [
            ("0.0.0.0", "address that others get"),
            ("::", "no IPv4 address"),
            ("203.0.113.1", "cannot listen on 203.0.113.1 ("),
        ],
    )
    def test_a_worker_needs_an_address_of_this_machine(
        self, ran: list[Any], host: str, why: str
    ) -> None:
        result = runner.invoke(cli.app, ["decode", "--host", host])
        assert isinstance(result.exception, ConfigError)
        assert why in str(result.exception)
        assert ran == []

    @pytest.mark.parametrize(
        ("etcd", "warned"),
        [("http://127.0.0.1:1", False), ("http://10.0.0.9:1", True), ("h:1,localhost:2", False)],
    )
    def test_loopback_in_a_cluster_of_several_machines(
        self, ran: list[Any], tmp_path: Path, etcd: str, warned: bool
    ) -> None:
        (tmp_path / "config.json").write_text("{}")
        where = ["--etcd", etcd, "--nats", "nats://h:2", "--model", str(tmp_path)]
        result = runner.invoke(cli.app, ["prefill", *where])
        assert result.exit_code == 7
        assert (
            "which only this machine reaches, but etcd is at 10.0.0.9" in result.output
        ) is warned
