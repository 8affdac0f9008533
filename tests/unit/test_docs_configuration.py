"""docs/configuration.md lists every command, flag, variable, setting and metric, with defaults."""

from __future__ import annotations

import itertools
import re

import msgspec

from pullfill import wire
from pullfill.options import USUAL, FrontendOptions, UpOptions, WorkerOptions, declared
from pullfill.queue.streams import DEFAULTS
from tests.support.docs import (
    COMMANDS,
    NAMES,
    code_of,
    commands,
    flags,
    python_files,
    text_of,
)
from tests.support.metrics import EVERYWHERE, families

PROCESSES = {
    "all": ("up", "worker", "decode", "prefill", "frontend"),
    "workers": ("worker", "decode", "prefill"),
    "decode": ("worker", "decode"),
    "prefill": ("worker", "prefill"),
    **{command: (command,) for command in ("up", "frontend")},
}
"""What the table of flags calls the commands that start processes."""


def flag_rows() -> list[tuple[str, str]]:
    """The flags of a row of that table with their default, and the commands that have them."""
    return re.findall(r"^\| (`--[^|]*) \| ([a-z, ]+) \|", COMMANDS.read_text(), re.M)


def test_configuration_lists_every_command_and_flag() -> None:
    """Row by row: no flag missing, none too many. Flags for testing are hidden and not listed."""
    rows: dict[str, set[str]] = {}
    for row in re.findall(r"^- (`pullfill [^(:]*)(\(`--[^)]*\))?: ", COMMANDS.read_text(), re.M):
        for command in re.findall(r"`pullfill ((?:config )?[a-z]+)", row[0]):
            rows[command] = set(re.findall(r"(?<![a-z-])--?[a-z][a-z-]*", row[1]))
    for named, of in flag_rows():
        for command in (c for word in of.split(", ") for c in PROCESSES[word]):
            rows[command] |= set(re.findall(r"(?<![a-z-])--?[a-z][a-z-]*", named))
    assert set(rows) == {c for c in commands() if c not in ("config",)}
    common = {"--help", "-h", "--state-dir", "--etcd", "--nats", "--namespace", "--security"}
    for command, listed in rows.items():
        assert listed - common == flags(commands()[command]) - common, command


def test_defaults_of_flags() -> None:
    shown: dict[str, str] = {}
    for named, _ in flag_rows():
        default = re.search(r"\(([^)]*)\)$", named)
        for flag in re.findall(r"--[a-z-]+", named):
            shown[flag] = default[1] if default else ""
    real: dict[str, str] = {}
    for kind in (UpOptions, FrontendOptions, WorkerOptions):
        for one in declared(kind):
            if not one.hidden and one.default not in (None, "", (), USUAL):
                text = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
                real[one.name.partition("/")[0]] = {"True": "on", "False": "off"}.get(text, text)
    assert {flag: text for flag, text in shown.items() if text and "--no-" not in flag} == real


def test_environment_variables() -> None:
    pattern = r"PULLFILL_[A-Z_]+[A-Z]"
    used = {v for path in python_files() for v in re.findall(pattern, path.read_text())}
    documented = set(re.findall(pattern, COMMANDS.read_text()))
    assert documented == used
    for name in NAMES:
        assert set(re.findall(pattern, text_of(name))) <= used


def test_failpoints() -> None:
    used = set()
    for path in python_files():
        for point in re.findall(r"failpoints\.hit\(f?\"([\w.{}]+)\"\)", path.read_text()):
            for transport, verb in itertools.product(("shm", "cuda_ipc"), ("read", "write")):
                used.add(point.format(first="N", verb=verb, transport=transport))
    text = text_of("CONTRIBUTING.md")
    table = re.search(r"^Failpoints are .*?\n\n(.*?)\n\n", text, re.M | re.S)
    assert table is not None
    assert set(re.findall(r"`([\w.]+)`", table[1])) == used


def test_router_settings_and_their_defaults() -> None:
    rows = re.findall(r"^\| `router\.(\w+)` \| (?:`(\w+)`|([\d.]+)) \|", COMMANDS.read_text(), re.M)
    documented = {name: word or float(number) for name, word, number in rows}
    real = msgspec.to_builtins(wire.RouterConfig())
    said = {k: str(v).lower() if isinstance(v, bool) else v for k, v in real.items()}
    assert documented == {k: v if isinstance(v, str) else float(v) for k, v in said.items()}


def test_queue_settings_and_their_defaults() -> None:
    rows = re.findall(r"^\| `queue\.(\w+)` \| ([^|]+) \|", COMMANDS.read_text(), re.M)
    documented = {name: -1.0 if value == "no limit" else float(value) for name, value in rows}
    assert documented == msgspec.to_builtins(DEFAULTS)


def metric_rows() -> dict[str, str]:
    """The item of each metric in the list."""
    rows = re.findall(r"^- `pullfill_.*(?:\n  .*)*", COMMANDS.read_text(), re.M)
    return {m: row for row in rows for m in re.findall(r"pullfill_\w+", row.split(": ")[0])}


def test_metrics_are_documented_and_the_documented_exist() -> None:
    real = families().keys()
    assert len(real) > 15
    assert metric_rows().keys() == real
    for name in NAMES:
        named = {m for code in code_of(name) for m in re.findall(r"\bpullfill_[a-z_]+[a-z]", code)}
        assert named <= real | EVERYWHERE | {"pullfill_installed"}, name


def test_metric_labels() -> None:
    for name, labels in families().items():
        if labels:
            shown = re.search(rf"`{name}\{{([\w,]+)\}}`", COMMANDS.read_text())
            assert shown is not None, name
            assert tuple(shown[1].split(",")) == labels, name


def test_every_route_of_ours_is_listed() -> None:
    text = COMMANDS.read_text().split("\n## HTTP\n")[1].split("\n## ")[0]
    for path, pattern in (
        ("frontend/routes.py", r"Route\(\"([^\"]+)\""),
        ("pullfill/runtime/probe.py", r"add_get\(\"([^\"]+)\""),
    ):
        routes = re.findall(pattern, text_of(path))
        assert len(routes) >= 4
        ids = r"\{request_id(:path)?\}"
        assert [r for r in routes if f"`{re.sub(ids, 'ID', r)}`" not in text] == []


def test_every_alert_is_listed() -> None:
    alerts = re.findall(r"- alert: (\w+)", text_of("deploy/prometheus/alerts.yaml"))
    listed = re.findall(r"^- `(Pullfill\w+)`: ", text_of("docs/operations.md"), re.M)
    assert len(alerts) > 5
    assert listed == alerts
