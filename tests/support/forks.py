"""Tests of one run in several processes, forked once all tests are collected: `pytest --forks N`.

Each process of pytest-xdist imports and collects all tests by itself, which costs 4 s of CPU per
process here. A fork costs milliseconds, so there can be more of them than cores: many tests wait.

The parent collects, cuts the tests into pieces, writes the numbers of the pieces into a pipe and
forks. Each child takes one piece after the other from the pipe, runs its tests and sends their
reports back. The parent hands the reports to pytest as if it had run the tests itself, so the
summary, `-x`, `--junitxml`, `--durations` and `--lf` are those of one process. Session fixtures
exist once in each child that asks for them. Those of tests that belong together end with these.

If a child dies, its test fails, and a new child goes on with the rest of the piece. If C code
crashed, the failure shows where each thread was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import marshal
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import pytest

PIECE = 8
"""Most tests in a piece. Fewer would start module fixtures in more processes, more would leave
some processes without work at the end."""
NUMBER = 4
"""Bytes of the number of a piece in the pipe. A pipe holds 64 KiB, so 16,000 pieces."""
END_S, AGAIN_S = 30.0, 1.0
"""A child that is told to end takes down its fixtures in this time, or it is killed. It is told
again and again."""

Together = Callable[[pytest.Item], Hashable]
"""None, or a name that neighbours share which must be one piece."""


def pieces(items: Sequence[pytest.Item], together: Together) -> list[list[int]]:
    """Cut tests, told by their index, into runs of one file of at most PIECE tests."""

    def kind(index: int) -> tuple[Hashable, object]:
        key = together(items[index])
        return (None, items[index].path) if key is None else (key, None)

    cut: list[list[int]] = []
    for (key, _), run in groupby(range(len(items)), kind):
        whole = list(run)
        size = PIECE if key is None else len(whole)
        cut += [whole[i : i + size] for i in range(0, len(whole), size)]
    return cut


@dataclass
class Child:
    """A process that runs tests, as its parent sees it.

    trace: where it writes what its threads did when it crashed.
    rest: what it took and has not run yet."""

    pid: int
    receiver: Connection
    trace: Path
    rest: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = os.pidfd_open(self.pid)  # readable once the process has ended

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What it has said by now."""
        with contextlib.suppress(EOFError):
            while self.receiver.poll():
                yield marshal.loads(self.receiver.recv_bytes())

    def forget(self) -> None:
        os.close(self.end)
        self.receiver.close()


class Reporter:
    """In a child: collects the reports of its tests, for the parent. Warnings are errors here, so
    that they are in these."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self._config, self._sender = config, sender
        self._reports: list[dict[str, Any]] = []

    def say(self, kind: str, told: object) -> None:
        self._sender.send_bytes(marshal.dumps((kind, told)))

    def ran(self, index: int) -> None:
        self.say("ran", (index, self._reports))
        self._reports = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        told = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(told)


class Forks:
    """The plugin of a run with `--forks`."""

    def __init__(self, count: int, together: Together) -> None:
        self._count, self._together = count, together
        self._children: dict[int, Child] = {}
        self._forked = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed or not session.items:
            return None
        self._session, self._pieces = session, pieces(session.items, self._together)
        self._folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._take, give = os.pipe()
        with open(give, "wb") as numbers:
            numbers.write(b"".join(i.to_bytes(NUMBER) for i in range(len(self._pieces))))
        self._selector = DefaultSelector()
        try:
            for _ in range(min(self._count, len(self._pieces))):
                self._fork([])
            while self._children:
                self._look()
        finally:
            self._end_all()
            os.close(self._take)
            self._selector.close()
        return True

    def _look(self) -> None:
        """Wait for something, and take in all that children have said."""
        ready = [key for key, _ in self._selector.select()]
        ended = {key.data for key in ready if isinstance(key.fileobj, int)}
        for pid in {key.data for key in ready}:
            child = self._children[pid]
            for kind, told in child.messages():
                self._hear(child, kind, told)
            if pid in ended:  # looked at first, so its last messages were read
                self._ended(child)

    def _hear(self, child: Child, kind: str, told: Any) -> None:
        session = self._session
        hook, config = session.config.hook, session.config
        if kind == "piece":
            child.rest += self._pieces[told]
            return
        if kind == "broken":
            raise session.Interrupted(f"a test process cannot go on:\n{told}")
        index, reports = told
        child.rest.remove(index)
        for data in reports:
            report = hook.pytest_report_from_serializable(config=config, data=data)
            hook.pytest_runtest_logreport(report=report)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _reap(self, child: Child) -> int:
        """Of a child that has ended: its exit code, or -N if signal N ended it."""
        del self._children[child.pid]
        self._selector.unregister(child.end)
        self._selector.unregister(child.receiver)
        child.forget()
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])

    def _ended(self, child: Child) -> None:
        code = self._reap(child)
        if not child.rest:
            if code:
                raise RuntimeError(f"a test process ended between tests, with exit code {code}")
            return
        item = self._session.items[child.rest[0]]
        text = f"the test process ended in this test, with exit code {code}\n"
        text += child.trace.read_text() if child.trace.exists() else ""
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        item.config.hook.pytest_runtest_logreport(report=report)
        self._fork(child.rest[1:])

    def _end_all(self) -> None:
        """After an interrupt or an error. A child has its fixtures end what they started."""
        give_up = time.monotonic() + END_S
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        for child in list(self._children.values()):
            with DefaultSelector() as selector:
                selector.register(child.end, EVENT_READ)
                # Again: a callback of C code or a `__del__` may swallow the KeyboardInterrupt. A
                # child that has seen it ignores the signal from then on.
                while not selector.select(AGAIN_S):
                    late = time.monotonic() > give_up
                    os.kill(child.pid, signal.SIGKILL if late else signal.SIGTERM)
            self._reap(child)

    def _fork(self, first: list[int]) -> None:
        """A child that runs the tests `first`, then pieces from the pipe."""
        self._forked += 1
        receiver, sender = Pipe(duplex=False)
        trace = self._folder / f"fork{self._forked}.trace"
        pid = os.fork()
        if pid:
            sender.close()
            child = self._children[pid] = Child(pid, receiver, trace, list(first))
            for source in (child.end, receiver):
                self._selector.register(source, EVENT_READ, pid)
            return
        code = 1
        try:
            receiver.close()
            with trace.open("w") as file:
                faulthandler.enable(file)
                code = self._be_child(sender, first)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)

    def _be_child(self, sender: Connection, first: list[int]) -> int:
        """All of a child's life. Returns its exit code."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        self._selector.close()
        for other in self._children.values():
            other.forget()
        session, config = self._session, self._session.config
        plugins = config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are the parent's
        capture.start_global_capturing()
        plugins.unregister(name="terminalreporter")
        reporter = Reporter(config, sender)
        plugins.register(reporter)
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = self._folder / f"fork{self._forked}"
        factory._basetemp.mkdir(mode=0o700)
        try:
            self._run(reporter, first)
            gc.collect()
            config._ensure_unconfigure()  # raises what the collector found too late for a test
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            return 1
        except BaseException:
            reporter.say("broken", traceback.format_exc())
            raise
        finally:
            session._setupstate.teardown_exact(None)
        return 0

    def _run(self, reporter: Reporter, first: list[int]) -> None:
        """In a child: its tests."""

        def to_run() -> Iterator[int]:
            yield from first
            while taken := os.read(self._take, NUMBER):
                number = int.from_bytes(taken)
                reporter.say("piece", number)
                yield from self._pieces[number]

        session, items = self._session, self._session.items
        coming = to_run()
        index = next(coming, None)
        while index is not None:
            # Known beforehand: fixtures that the next test needs too stay.
            following = next(coming, None)
            item, after = items[index], None if following is None else items[following]
            key = self._together(item)
            if after is not None and key is not None and self._together(after) != key:
                after = None  # what is idle from here on would take time from others
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            reporter.ran(index)
            index = None if session.shouldfail or session.shouldstop else following
