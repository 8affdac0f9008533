"""The dashboard, and promtool where this machine has it."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "dashboard.json"


@cache
def dashboard() -> dict[str, Any]:
    """Return the dashboard for Grafana. Calls share it."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def missing() -> str:
    """Why the tests with promtool cannot run. Empty: they can."""
    return "" if shutil.which("promtool") else "no promtool (Debian: apt-get install prometheus)"


def promtool(*arguments: str) -> str:
    """What promtool prints. Raises AssertionError with it if promtool finds a fault."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed
