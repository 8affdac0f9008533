"""Flags are declared once: what a command line gives, and what gives a command line, agree."""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import Enum
from functools import wraps
from typing import Any

import pytest
from click.testing import CliRunner

from pullfill.deploy import cli, run_role
from pullfill.errors import ConfigError
from pullfill.options import (
    ClusterOptions,
    Flag,
    FrontendOptions,
    RoleOptions,
    UpOptions,
    WorkerOptions,
    arguments,
    check_address,
    declared,
    parse_listen,
    parse_networks,
)

KINDS = {"decode": WorkerOptions, "prefill": WorkerOptions, "frontend": FrontendOptions}
# Of flags whose values have a form of their own.
FORMS: dict[str, Any] = {
    "instance_id": "i-1", "cores": (2, 0), "transports": frozenset({"shm", "tcp"}),
    "advertise_kv": "tcp://h:2", "advertise_control": "tcp://h:5", "advertise": "https://h",
    "kv_credits": 8 << 20, "concurrency": 2, "own_port": 12,
    "heartbeats": "tcp://10.0.0.1:7", "heartbeats_from": parse_networks("10.0.0.0/24,fd00::/64"),
}  # fmt: skip


def changed(one: Flag) -> Any:
    """A value that is not the default."""
    if isinstance(one.default, Enum):
        return list(type(one.default))[-1]
    if isinstance(one.default, bool):
        return not one.default
    return one.default + 1 if isinstance(one.default, int | float) else FORMS.get(one.field, "x")


def options_of(role: str, roles: Collection[str]) -> RoleOptions:
    """Each flag of these roles has a value that is not its default."""
    flags = declared(KINDS[role])
    return KINDS[role](**{f.field: changed(f) for f in flags if not f.role or f.role in roles})


CLUSTER = ClusterOptions(state_dir="d", etcd="e", nats="n", namespace="ns", security="s")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the roles were started with."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("run_worker", "run_frontend"):

        @wraps(getattr(run_role, name))  # its parameters say which flags the command has
        def run(**given: Any) -> int:
            calls.append((given["options"], given["cluster"], given["vllm_args"]))
            return 0

        monkeypatch.setattr(run_role, name, run)
    return calls


@pytest.mark.parametrize("role", KINDS)
def test_a_command_line_gives_the_options_that_made_it(role: str, ran: list[Any]) -> None:
    options = options_of(role, [role])
    line = [*arguments(options, role), *arguments(CLUSTER)]
    others_too = options_of(role, KINDS)
    assert [*arguments(others_too, role), *arguments(CLUSTER)] == line
    result = CliRunner().invoke(cli.app, [role, *line, "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert ran == [(options, CLUSTER, ["--seed", "1"])]


@pytest.mark.parametrize(
    ("given", "workers_s", "frontends_s"),
    [([], 60.0, 600.0), (["--drain-timeout", "7"], 7.0, 7.0)],
)
def test_frontends_of_up_drain_longer_than_workers_unless_it_is_told(
    given: list[str], workers_s: float, frontends_s: float, ups: list[UpOptions]
) -> None:
    assert CliRunner().invoke(cli.app, ["up", *given]).exit_code == 0
    (options,) = ups
    assert options.drain_s("decode") == workers_s
    assert options.drain_s("frontend") == frontends_s + options.frontend.ready_grace_s


def test_an_address_to_listen_at() -> None:
    assert parse_listen("--heartbeats", None) is None
    for given in ("7", "127.0.0.1:7", "tcp://127.0.0.1:7"):
        assert parse_listen("--heartbeats", given) == "tcp://127.0.0.1:7"
    assert parse_listen("--heartbeats", "0.0.0.0:7") == "tcp://0.0.0.0:7"
    for wrong in ("", "h", "0", "65536", "tcp://", "tcp://7x", "h:x", "h:0", "h:65536", "a#b:1"):
        with pytest.raises(ConfigError, match="--heartbeats"):
            parse_listen("--heartbeats", wrong)
    for wrong in ("", "h", "tcp://h", ":1"):
        with pytest.raises(ConfigError, match="--advertise-kv"):
            check_address("--advertise-kv", wrong)


def test_networks_whose_heartbeats_are_heard() -> None:
    assert parse_networks(None) == ()
    assert list(map(str, parse_networks("10.0.0.0/24, ::1"))) == ["10.0.0.0/24", "::1/128"]
    for wrong in ("10.0.0.1/24", "h", "10.0.0.0/24,"):
        with pytest.raises(ConfigError, match=r"--heartbeats-from: .* e.g. 10.0.0.0/24"):
            parse_networks(wrong)
