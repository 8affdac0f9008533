"""A whole small benchmark over stand-in servers: what is run, in which order, and what fails."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_serving
from benchmarks.live import BenchError
from benchmarks.machine import QUIET_CORES, OtherLoad
from benchmarks.serving import campaign, parts, workloads
from benchmarks.serving.campaign import Campaign, Measured
from benchmarks.serving.contract import Kind, Name, Running, System
from benchmarks.serving.load import Result
from benchmarks.serving.meter import Use
from benchmarks.serving.parts import Scale, Session
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.window import Window
from benchmarks.serving.workloads import Workload
from tests.support.sse_server import SseServer, Step, whole

SCALE = Scale(control_s=0.2, longs_s=1.1, conversations=1, turns=2, idle_s=0.0)


class Told:
    """What a session would have measured."""

    def __init__(self) -> None:
        self.windows: list[tuple[str, str]] = []
        self.first: list[tuple[int, ...]] = []
        self.policies: list[str] = []

    def measure(self, running: Running, part: str, label: str, repeat: int, w: Workload) -> Any:
        self.windows.append((part, label))
        self.first.append(w.asks[0].prompt[:16])
        result = Result([], 1.0, 0.1)
        return Window(running.name, part, label, repeat, w.seconds, result, Use(1.0))


def session(
    monkeypatch: pytest.MonkeyPatch, *, name: str = "x", repeat: int = 0, told: bool = False
) -> tuple[Session, Told]:  # fmt: skip
    seen = Told()
    monkeypatch.setattr(parts, "measure", seen.measure)
    monkeypatch.setattr(parts, "explain", lambda *_: None)
    # Nothing was asked of anybody, so nothing failed either.
    monkeypatch.setattr("benchmarks.serving.stats.failed", lambda answers: [])
    running = Running(name, "http://x", "m", {}, 1.0, Path())
    running.set_policy = seen.policies.append if told else None
    system = System(name, "", lambda _: held(running), ours=True)
    made = Session(system, running, SCALE, range(5, 99), repeat, lambda _: None)
    monkeypatch.setattr(Session, "measure", _not_judged)
    return made, seen


def _not_judged(self: Session, part: str, label: str, w: Workload, *, keep: bool = True) -> Any:
    found: Window = vars(parts)["measure"](self.running, part, label, self.repeat, w)
    if keep:
        self.windows.append(found)
    return found


@contextmanager
def held(running: Running) -> Iterator[Running]:
    yield running


class TestParts:
    def test_control_and_longs_take_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, seen = session(monkeypatch)
        parts.interference(made)
        parts.interference(made)
        assert [label for _, label in seen.windows] == ["control", "longs"] * 2
        assert len(set(seen.first)) == 4  # no window asks what another did
        made, seen = session(monkeypatch, repeat=1)
        parts.interference(made)
        assert [label for _, label in seen.windows] == ["longs", "control"]

    def test_one_core_gets_the_long_prompts_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, seen = session(monkeypatch, name=Name.ONE_CORE)
        parts.interference(made)
        assert [label for _, label in seen.windows] == ["control", "alone"]

    def test_every_system_is_asked_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[Any, Any]] = []
        everything: list[Window] = []
        for name in ("a", "b"):
            made, seen = session(monkeypatch, name=name)
            made.windows = everything
            for part in parts.RUN.values() if name == "a" else [parts.chat]:
                part(made)
            asked.append(dict(zip(seen.windows, seen.first, strict=True)))
        assert {key: asked[0][key] for key in asked[1]} == asked[1]

    def test_warm_up_takes_every_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, seen = session(monkeypatch, told=True)
        parts.warm_up(made)
        assert seen.policies == ["always_remote", "always_local", "conditional"]
        assert made.windows == []

    def test_a_session_of_which_nothing_was_answered_is_over(self) -> None:
        server = SseServer(lambda _: [b""])
        with server.in_a_thread():
            running = Running("x", server.url, "m", {os.getpid(): "me"}, 1.0, Path())
            system = System("x", "", lambda _: held(running))
            made = Session(system, running, SCALE, range(5, 99), 0, lambda _: None)
            with pytest.raises(BenchError, match="every request failed: no answer"):
                parts.chat(made)
        assert len(made.windows) == 1  # it still counts as failed requests


class TestOrder:
    def test_another_system_begins_each_time(self) -> None:
        systems = [System(n, "", lambda _: held(None)) for n in "abc"]  # type: ignore[arg-type]
        orders = ["".join(s.name for s in campaign.rotated(systems, r)) for r in range(3)]
        assert orders == ["abc", "acb", "cab"]
        assert campaign.rotated([], 1) == []


class TestCampaign:
    @pytest.fixture
    def server(self) -> Iterator[SseServer]:
        with SseServer().in_a_thread() as server:
            yield server

    @pytest.fixture(autouse=True)
    def hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(OtherLoad, "look", lambda *_: None)
        monkeypatch.setattr(parts, "SETTLE_S", 0.0)
        monkeypatch.setattr(workloads, "STAGGER_S", 0.01)
        monkeypatch.setattr(workloads, "FASTEST", 20_000.0)
        monkeypatch.setattr(workloads, "SHORT_OUT", 3)

    def run(self, tmp_path: Path, *systems: System, **table: tuple[str, ...]) -> Measured:
        return Campaign(systems, SCALE, table, 1, range(5, 99), tmp_path).run()

    def test_a_system_is_measured_and_one_that_does_not_start_is_told(
        self, server: SseServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken(base: Path) -> AbstractContextManager[Running]:
            raise BenchError("no such binary")

        def slow(body: dict[str, Any]) -> list[Step]:
            # Tokens that a busy machine reads together have no time between them.
            return [part for step in whole(body) for part in (0.02, step)]

        server.script = slow

        def launch(base: Path) -> AbstractContextManager[Running]:
            assert base.is_dir()
            return held(Running("it", server.url, "m", {os.getpid(): "me"}, 2.5, base))

        measured = self.run(
            tmp_path, System("bad", "", broken), System("it", "", launch), interference=("bad",)
        )
        (trouble,) = measured.troubles
        assert (trouble.system, trouble.where, trouble.what) == ("bad", "start", "no such binary")
        assert [(w.system, w.label) for w in measured.windows] == [
            ("it", "control"), ("it", "longs")
        ]  # fmt: skip
        _, longs = measured.windows
        assert {a.ask.kind for a in longs.answers} == {Kind.SHORT, Kind.LONG}
        assert not [a.error for a in longs.answers if a.error]
        assert longs.use.cpu_s["me"] > 0
        assert longs.result.lag_s
        assert longs.gaps()
        assert measured.ready_s == {"it": [2.5]}
        assert "[2/2] it: interference, longs" in capsys.readouterr().out

    def test_who_ends_it_gets_what_there_is(self, tmp_path: Path) -> None:
        def ends(base: Path) -> AbstractContextManager[Running]:
            raise SystemExit(143)

        systems = [System(n, "", ends) for n in "ab"]
        measured = self.run(tmp_path, *systems, interference=("a", "b"))
        assert measured.cut
        assert measured.windows == []

    def test_parts_go_to_the_systems_they_name(self, tmp_path: Path) -> None:
        table = {"interference": ("a",), "chat": ("a", "b")}
        made = Campaign([], SCALE, table, 1, range(9), tmp_path)
        wanted = [made.parts_of(System(n, "", lambda _: held(None))) for n in "abc"]  # type: ignore[arg-type]
        assert wanted == [("interference", "chat"), ("chat",), ("interference",)]


class TestCommand:
    def options(self, *arguments: str) -> argparse.Namespace:
        return bench_serving.parser().parse_args(arguments)

    def test_everything_is_chosen_by_default(self) -> None:
        systems, table = bench_serving.plan(self.options())
        assert {s.name for s in systems} == set(SYSTEMS)
        assert set(table) == set(parts.RUN)

    def test_some(self) -> None:
        options = self.options("--quick", "--systems", "nixl", "--workloads", "chat")
        systems, table = bench_serving.plan(options)
        assert [s.name for s in systems] == ["nixl"]
        assert set(table) == {"chat"}

    @pytest.mark.parametrize("flags", [["--systems", "x"], ["--workloads", "chat,x"]])
    def test_unknown_names(self, flags: list[str]) -> None:
        with pytest.raises(SystemExit, match="is called x; there are"):
            bench_serving.plan(self.options(*flags))

    def test_what_is_not_quiet(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = Result([], 1.0, 0.1)
        use = Use(1.0)
        still = Window("x", "chat", "", 0, None, result, use)
        made = Measured([], [still])
        assert bench_serving.is_quiet(made)
        made.quiet.others.append(2 * QUIET_CORES)
        assert not bench_serving.is_quiet(made)
        loud = Window("x", "chat", "", 0, None, result, use, others=0.3)
        assert not bench_serving.is_quiet(Measured([], [still, loud]))
        assert "others used 30 %" in capsys.readouterr().out
