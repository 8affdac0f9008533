"""Whose work a worker's CPU time is: the engine's (vLLM's core on the mock backend) or ours.

`install` wraps the calls between the two, in one worker process, before its engine is built. Each
wrapper reads the thread's CPU clock twice (some 0.6 µs together, which count as ours). `report`
is what the process says when it is asked with SIGUSR1: totals since it began.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

_ENGINE_CALLS = ("step_fn", "add_request", "preprocess_add_request", "abort_requests")
"""What the host and the request server call on the core."""
DECODE_CALLS = ("decide", "enqueue", "collect", "request_finished")
PREFILL_CALLS = ("matched", "allocated", "scheduled", "finished")
"""Our code that vLLM's scheduler calls in the middle of its own, in each kind of worker."""

_clock = time.thread_time_ns


class Counters:
    """engine_ns: the engine thread inside vLLM, our part taken out. side_ns: that part."""

    def __init__(self) -> None:
        self.engine_ns = 0
        self.side_ns = 0
        self.steps = 0

    def engine(self, call: Callable[..., Any], counts: bool = False) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            begin, ours = _clock(), self.side_ns
            try:
                return call(*args)
            finally:
                self.engine_ns += _clock() - begin - (self.side_ns - ours)
                self.steps += counts

        return wrapped

    def side(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(side: Any, *args: Any) -> Any:
            begin = _clock()
            try:
                return call(side, *args)
            finally:
                self.side_ns += _clock() - begin

        return wrapped

    def report(self) -> dict[str, Any]:
        return {
            "cpu_ns": time.process_time_ns(),
            "engine_ns": self.engine_ns,
            "side_ns": self.side_ns,
            "steps": self.steps,
            "threads": _threads(),
        }


def _threads() -> dict[str, int]:
    """CPU of this process by thread name, ns; `native`: those that Python did not start."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names[os.getpid()] = "loop"  # Python's own note of it is the parent's, after a fork
    used: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), "native")
        name = name.split("-")[0].split(" ")[0]
        used[name] = used.get(name, 0) + int((task / "schedstat").read_text().split()[0])
    return used


def install(side_class: type[Any], calls: Sequence[str], where: Path) -> None:
    """Wrap; answer SIGUSR1 with a file `where`/PID.json, which appears whole."""
    from pullfill.engine.host import EngineHost

    counters = Counters()
    for name in calls:
        setattr(side_class, name, counters.side(getattr(side_class, name)))
    build = EngineHost.build

    def built(host: EngineHost) -> None:
        build(host)
        core = host.core
        for name in _ENGINE_CALLS:
            # It stays a method: engine/requests.py calls one with another object.
            wrapped = counters.engine(getattr(core, name).__func__, counts=name == "step_fn")
            setattr(core, name, MethodType(wrapped, core))

    EngineHost.build = built  # type: ignore[method-assign, assignment]

    def tell(*_: Any) -> None:
        path = where / f"{os.getpid()}.json"
        text = json.dumps(counters.report())
        part = path.with_suffix(".part")
        part.write_text(text)
        part.rename(path)

    signal.signal(signal.SIGUSR1, tell)
