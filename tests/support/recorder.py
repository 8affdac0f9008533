"""Records which functions of pullfill a worker calls, and when it first does.

Every process of a cluster writes to one file. A byte that all of them map is the number of the
window that is open, 0: none. In each window a process writes a line when it calls a function for
the first time. So a line costs nothing once it is there.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

RECORD = "PULLFILL_TESTS_RECORD"
"""Environment variable: the file. The window's byte is in a file beside it."""

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("pullfill", "frontend", "decode_worker", "prefill_worker", "queue", "transfer")


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """The first call of a function in a window. at: in seconds; one clock for all processes.

    caller_file, caller: the function of pullfill that it was called by. `-`: none."""

    at: float
    window: int
    role: str
    thread: str
    file: str
    function: str
    caller_file: str
    caller: str


def window_of(record: Path) -> mmap.mmap:
    """The byte that says which window is open."""
    path = record.with_suffix(".window")
    if not path.exists():
        path.write_bytes(b"\0")
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def start(record: Path, role: str) -> None:
    """Record the calls of this process: of this thread and of those that start later."""
    byte = window_of(record)
    out = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    seen: set[tuple[int, CodeType]] = set()

    @cache
    def place(code: CodeType) -> str:
        """`file function` of one of our functions, else nothing."""
        path = os.path.realpath(code.co_filename)
        if not path.startswith(f"{ROOT}/") or code.co_name.startswith("<"):
            return ""
        file = os.path.relpath(path, ROOT)
        return f"{file} {code.co_qualname}" if file.split("/")[0] in ROOMS else ""

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        window = byte[0]
        if not window or event != "call" or (window, frame.f_code) in seen:
            return
        seen.add((window, frame.f_code))
        if not (where := place(frame.f_code)):
            return
        above, caller = frame.f_back, ""
        while above is not None and not (caller := place(above.f_code)):
            above = above.f_back
        thread = threading.current_thread().name.split("_")[0].replace(" ", "-")
        line = f"{time.monotonic():.6f} {window} {role} {thread} {where} {caller or '- -'}\n"
        os.write(out, line.encode())

    threading.setprofile(on_event)
    sys.setprofile(on_event)


def read(record: Path) -> list[Call]:
    """All calls, in the order of time."""
    found = []
    for line in record.read_text().splitlines():
        at, window, *rest = line.split(" ")
        found.append(Call(float(at), int(window), *rest))
    return sorted(found)
