"""What `up --dry-run` prints, and that it does nothing else."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pullfill.deploy import accelerator, cli, plan
from pullfill.deploy.procs import start_time
from pullfill.deploy.state import Launch, StateDir
from pullfill.errors import ConfigError


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")


def dry_run(*flags: str) -> str:
    result = CliRunner().invoke(cli.app, ["up", "--dry-run", "--port", "0", *flags])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_each_process_with_a_command_that_the_parser_takes(state_dir: Path) -> None:
    flags = ("--prefill", "2", "--seed=3", "--kv-mode", "pull", "--set", "router.policy=cost")
    first, *rest = dry_run(*flags).splitlines()
    assert first == f"would start in {state_dir}, namespace default:"
    names = [line.split()[0] for line in rest if line.startswith("  ") and line[2] != " "]
    workers = ["decode-0", "prefill-0", "prefill-1", "frontend-0"]
    assert names == ["nats", "etcd", *workers, "setting"]
    commands = [line.split() for line in rest if line.startswith("    pullfill ")]
    assert [command[1] for command in commands] == ["decode", "prefill", "prefill", "frontend"]
    assert all("--seed=3" in command for command in commands)
    assert ["--kv-mode" in command for command in commands] == [True, False, False, False]
    assert "  setting      router.policy=cost" in rest
    assert rest[-1].startswith("clients: http://127.0.0.1:")
    for line in (line for line in rest if line.startswith("    pullfill ")):
        _, role, *argv = shlex.split(line)
        assert CliRunner().invoke(cli.app, [role, *argv, "--help"]).exit_code == 0
    assert not state_dir.exists()


def test_servers_of_ones_own_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.servers, "etcd_ready", lambda *_: None)
    told = dry_run("--etcd", "http://h:1")
    assert "etcd         not started: http://h:1" in told
    assert "--etcd http://h:1" in told


def test_nobody_reads_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.servers, "etcd_ready", lambda *_: None)
    monkeypatch.setattr(plan.servers, "nats_ready", lambda *_: None)
    login = "user:s3cr3t@h"
    flags = ["--etcd", f"http://{login}:1", "--nats", f"nats://{login}:2"]
    stock = ["--forwarder", "staged", "--servers", "prefill=http://s:1@k:2,decode=http://d:3"]
    told = dry_run(*flags, *stock, f"--otlp-traces-endpoint=http://{login}:3")
    assert "s3cr3t" not in told
    for shown in ("http://h:1", "nats://h:2", "=http://h:3", stock[-1]):
        assert shown in told


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--decode", "0"], "cannot serve"),
        (["--set", "router.policy"], "give KEY=VALUE"),
        (["--set", "router.policy=never"], "is not allowed"),
        (["--prefill-devices", "7"], "there is no core 7 here: there are 0, 1"),
    ],
)
def test_it_refuses_what_up_refuses(state_dir: Path, flags: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        dry_run(*flags)


def test_it_says_that_a_cluster_runs_there(state_dir: Path) -> None:
    state_dir.mkdir()
    own = os.getpid()
    launch = Launch(
        cluster_id="x", model="m", supervisor_pid=own, supervisor_started=start_time(own) or 0
    )
    StateDir(state_dir).write_launch(launch)
    with pytest.raises(ConfigError, match="already runs"):
        dry_run()
