"""Targets of the serving benchmark, both ways, on figures made up here; tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from benchmarks import report
from benchmarks.serving.campaign import Measured, Trouble
from benchmarks.serving.contract import Answer, Ask, Kind, Name, System
from benchmarks.serving.load import Result
from benchmarks.serving.meter import Use
from benchmarks.serving.parts import CONTROL, LONGS
from benchmarks.serving.verdict import BUSY, Verdict, chat_shares
from benchmarks.serving.window import Window

IDS = itertools.count()


def system(name: str) -> System:
    aggregated = name in (Name.AGGREGATED, Name.AGGREGATED_256, Name.ROUND_ROBIN)
    return System(
        name,
        f"note of {name}",
        lambda _: nullcontext(Mock()),
        aggregated,
        name.startswith("pullfill"),
    )


def stream(itl_ms: float, tokens: int = 101) -> Answer:
    times = [0.01 + 1e-3 * itl_ms * n for n in range(tokens)]
    return Answer(Ask(Kind.SHORT, (1,) * 32, tokens, "s"), 0, 0, times, list(range(tokens)))


def long(ttft_ms: float, length: int = 3000) -> Answer:
    asked = Ask(Kind.LONG, (1,) * length, 1, "l")
    return Answer(asked, 1.0, 1.0, [1.0 + 1e-3 * ttft_ms], request_id=f"id-{next(IDS)}")


def window(
    name: str,
    part: str,
    label: str,
    answers: Sequence[Answer],
    *,
    path: str = "remote",
    cpu_s: float = 1.0,
    others: float = 0.0,
) -> Window:
    result = Result(list(answers), 10.0, 0.1, [0.001] * 10)
    seconds = None if part == "chat" else 10.0
    found = Window(name, part, label, 0, seconds, result, Use(10.0, {"all": cpu_s}), others)
    told = {"path": path, "timings_ms": {"queue": 2.0, "prefill": 80.0, "commit": None}}
    found.explained = {a.request_id: told for a in answers if a.request_id}
    return found


def interference(
    name: str, control: float = 10.0, longs: float = 12.0, streams: int = 4, ttft: float = 100.0,
    cpu_s: float = 1.0,
) -> list[Window]:  # fmt: skip
    """ITL in ms; tokens per second follow from `streams`."""
    at = [stream(longs)] * streams
    return [
        window(name, "interference", CONTROL, [stream(control)] * 4),
        window(name, "interference", LONGS, [*at, long(ttft)], cpu_s=cpu_s),
    ]


def measured(*windows: Window, idle: dict[str, float] | None = None) -> Measured:
    names = list(dict.fromkeys(w.system for w in windows))
    made = Measured([system(n) for n in names], list(windows))
    made.idle = {name: [Use(1.0, {"all": cores})] for name, cores in (idle or {}).items()}
    return made


def row(made: Measured, metric: str, peer: str = "") -> report.Row:
    (found,) = [r for r in Verdict(made).rows() if metric in r.metric and peer in r.peer]
    return found


class TestInterference:
    @pytest.mark.parametrize(("longs", "ok"), [(14.9, True), (15.1, False)])
    def test_own_control(self, longs: float, ok: bool) -> None:
        made = measured(*interference(Name.PULLFILL, 10.0, longs))
        found = row(made, "(a) ITL p99", "own control")
        assert (found.ok, found.target) == (ok, "ratio <= 1.5")
        assert found.value == pytest.approx(longs)

    @pytest.mark.parametrize(("theirs", "ok"), [(13.0, True), (12.0, False), (11.0, False)])
    def test_every_aggregated_system_must_be_slower(self, theirs: float, ok: bool) -> None:
        ours = interference(Name.PULLFILL)
        far = interference(Name.AGGREGATED, longs=500.0)
        near = interference(Name.ROUND_ROBIN, longs=theirs)
        made = measured(*ours, *far, *near)
        assert row(made, "(a) ITL p99", Name.AGGREGATED).ok
        assert row(made, "(a) ITL p99", Name.ROUND_ROBIN).ok is ok

    def test_medians_over_windows(self) -> None:
        some = [interference(Name.PULLFILL, longs=longs)[1] for longs in (11.0, 12.0, 90.0)]
        control = interference(Name.PULLFILL)[0]
        assert row(measured(control, *some), "(a) ITL p99", "own control").value == 12.0

    def test_a_row_of_a_busy_machine_says_so(self) -> None:
        one, two = interference(Name.PULLFILL)
        two.others = 0.5
        assert row(measured(one, two), "(a) ITL p99", "own control").metric.endswith(BUSY)


def turn(tokens: int, hit: int, lane: str = "c") -> Answer:
    asked = Ask(Kind.TURN, (1,) * tokens, 2, lane, grows=True)
    return Answer(asked, 0, 0, [1.0, 2.0], [1, 2], cached=0, request_id=f"{lane}-{tokens}-{hit}")


class TestChat:
    def made(self, hit: int) -> Window:
        found = window(Name.PULLFILL, "chat", "", [turn(98, 0), turn(98, hit)])
        found.explained = {
            a.request_id: {"path": "local", "prefix_hit_tokens": int(a.request_id.split("-")[2])}
            for a in found.answers
        }
        return found

    @pytest.mark.parametrize(("hit", "ok"), [(95, True), (94, False)])
    def test_the_decode_workers_own_account_counts(self, hit: int, ok: bool) -> None:
        assert chat_shares(self.made(hit)) == [hit / 100]
        assert row(measured(self.made(hit)), "lowest turn").ok is ok


class TestTrouble:
    def test_a_system_that_did_not_start_is_a_row_that_fails(self) -> None:
        made = measured(*interference(Name.PULLFILL))
        made.troubles = [Trouble(Name.NIXL, 0, "start", "first\nno NIXL here\n")]
        found = row(made, "nixl: start failed")
        assert (found.ok, found.unit) == (False, "not measured: no NIXL here")
