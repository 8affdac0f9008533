"""`pullfill doctor`: over which transports KV can move here, and over which it does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pullfill.deploy.machine import FAIL, OK, WARN, Finding
from pullfill.deploy.members import ask_worker
from pullfill.registry.orders import LiveWorker

_PAIRS = 32
"""Print at most this many pairs."""


def transports() -> Iterator[Finding]:
    """Yield which transports work on this machine."""
    # A process of its own finds out: it opens devices and imports what is installed.
    command = [sys.executable, "-m", "pullfill.transfer.catalogue"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        survey: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        yield Finding(WARN, f"transports cannot be listed: {exc}", f"try {' '.join(command)}")
        return
    works = [name for name, why in survey.items() if why is None]
    others = "; ".join(f"not {name}: {why}" for name, why in survey.items() if why is not None)
    if works:
        yield Finding(OK, f"KV can move over {', '.join(works)} on this machine", others)
    else:
        yield Finding(FAIL, "no transport works on this machine", others)


def pairs(workers: Iterable[LiveWorker]) -> Iterator[Finding]:
    """Yield for each pair of workers which transport they use, and why no better one."""
    records = [worker.record for worker in workers]
    decode = [r.instance_id for r in records if r.role == "decode"]
    shown = 0
    for prefill in (r for r in records if r.role == "prefill" and r.http):
        if (report := ask_worker(prefill)) is None:
            continue
        routes = report.said.get("routes")
        for name in decode:
            shown += 1
            if shown > _PAIRS:
                yield Finding(OK, "... and more pairs of workers")
                return
            yield _pair(prefill.instance_id, name, routes if isinstance(routes, dict) else {})


def _pair(prefill: str, decode: str, routes: dict[str, Any]) -> Finding:
    route = routes.get(decode)
    if not isinstance(route, dict):
        return Finding(OK, f"{prefill} has written nothing to {decode} yet")
    why = "; ".join(f"not {reason}" for reason in route.get("why_not_better", ()))
    return Finding(OK, f"{prefill} writes to {decode} over {route.get('transport')}", why)
