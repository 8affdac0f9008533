"""Whose work a worker's CPU time is: the engine's (vLLM's core on the mock backend) or ours.

`install` wraps the calls between the two, in one worker process, before its engine is built. Each
wrapper reads the thread's CPU clock twice (some 0.6 µs together, which count as ours). `report`
is what the process says when it is asked with SIGUSR1: totals since it began.
"""

from __future__ import annotations

import cProfile
import functools
import json
import marshal
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
PREFILL_CALLS = ("matched", "allocated", "plan", "finished")
"""Our code that vLLM's scheduler calls in the middle of its own, in each kind of worker."""

_clock = time.thread_time_ns


class Counters:
    """engine_ns: the engine thread inside vLLM, our part taken out. side_ns: that part.
    decisions_ns: of each request that was decided, the time from asking to the opened job."""

    def __init__(self) -> None:
        self.engine_ns = 0
        self.side_ns = 0
        self.steps = 0
        self.decisions_ns: list[int] = []
        self._asked: dict[str, int] = {}

    def engine(self, call: Callable[..., Any], counts: bool = False) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            begin, ours = _clock(), self.side_ns
            try:
                return call(*args)
            finally:
                self.engine_ns += _clock() - begin - (self.side_ns - ours)
                self.steps += counts

        return wrapped

    def side(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(side: Any, *args: Any) -> Any:
            begin = _clock()
            try:
                return call(side, *args)
            finally:
                took = _clock() - begin
                self.side_ns += took
                self._note(name, args, took)

        return wrapped

    def _note(self, name: str, args: tuple[Any, ...], took: int) -> None:
        if name == "decide":
            self._asked[args[0].request_id] = took
        elif name == "enqueue":
            asked = self._asked.pop(args[0].request_id, None)
            if asked is not None and args[2]:
                self.decisions_ns.append(asked + took)

    def report(self) -> dict[str, Any]:
        decisions, self.decisions_ns = self.decisions_ns, []
        return {
            "cpu_ns": time.process_time_ns(),
            "engine_ns": self.engine_ns,
            "side_ns": self.side_ns,
            "steps": self.steps,
            "threads": _threads(),
            "decisions_ns": decisions,
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
        setattr(side_class, name, counters.side(name, getattr(side_class, name)))
    build = EngineHost.build

    def built(host: EngineHost) -> Any:
        core: Any = build(host)
        for name in _ENGINE_CALLS:
            # It stays a method: engine/requests.py calls one with another object.
            wrapped = counters.engine(getattr(core, name).__func__, counts=name == "step_fn")
            setattr(core, name, MethodType(wrapped, core))
        return core

    EngineHost.build = built  # type: ignore[method-assign, assignment]

    def tell(*_: Any) -> None:
        path = where / f"{os.getpid()}.json"
        text = json.dumps(counters.report())
        part = path.with_suffix(".part")
        part.write_text(text)
        part.rename(path)

    signal.signal(signal.SIGUSR1, tell)


def profile(where: Path) -> None:
    """Profile this thread (the loop's) and the engine thread from now on.

    SIGUSR2 writes the CPU time of each function so far to `where`/PID.loop.prof and
    PID.engine.prof. Profiling costs CPU, so do not use CPU figures of the same run."""
    from pullfill.engine.host import EngineHost

    profilers = {"loop": cProfile.Profile(time.thread_time)}
    run = EngineHost.run

    def profiled(host: EngineHost, on_built: Callable[[Any], None]) -> None:
        profilers["engine"] = cProfile.Profile(time.thread_time)
        profilers["engine"].enable()
        run(host, on_built)

    EngineHost.run = profiled  # type: ignore[method-assign, assignment]

    def tell(*_: Any) -> None:
        for name, profiler in profilers.items():
            # `dump_stats` cannot be used: it stops the profiler, and must run on its thread.
            profiler.snapshot_stats()
            part = where / f"{os.getpid()}.part"
            part.write_bytes(marshal.dumps(profiler.stats))
            part.rename(where / f"{os.getpid()}.{name}.prof")

    signal.signal(signal.SIGUSR2, tell)
    profilers["loop"].enable()
