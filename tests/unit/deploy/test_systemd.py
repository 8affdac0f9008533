"""deploy/systemd: the real command line takes what the units run. No systemd here."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest

from pullfill.runtime.lifecycle import EXIT_S
from tests.support.flags import expand, parse

UNITS = sorted((Path(__file__).resolve().parents[3] / "deploy" / "systemd").glob("*.service"))


def test_each_role_has_a_unit() -> None:
    roles = ("decode", "prefill", "frontend")
    assert {u.name for u in UNITS} == {f"pullfill-{r}@.service" for r in roles}


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.stem)
@pytest.mark.essential
def test_a_units_command_line(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(re.sub(r"\\\n\s*", "", unit.read_text()))
    service = parser["Service"]
    role = unit.stem.removeprefix("pullfill-").rstrip("@")
    comments = unit.read_text()
    example = re.search(r"ARGS=(.*)$", comments, re.M)
    assert example is not None
    values = {
        "ETCD": "http://10.0.0.1:2379", "NATS": "nats://10.0.0.1:4222", "NAMESPACE": "default",
        "MODEL": "/models/m", "SERVED_NAME": "m", "HOST": "10.0.0.7", "ARGS": example[1],
    }  # fmt: skip
    assert all(name in comments.split("[Unit]")[0] for name in values)
    words = shlex.split(expand(service["ExecStart"], values, r"\$\{?(\w+)\}?"))
    assert words[0].endswith("/pullfill")
    assert words[1] == role
    options = parse(words[1:])
    assert options["host"] == "10.0.0.7"
    assert float(service["TimeoutStopSec"]) >= (
        options["drain_timeout_s"] + options.get("ready_grace_s", 0.0) + EXIT_S
    )
    assert service["RestartPreventExitStatus"] == "2"
