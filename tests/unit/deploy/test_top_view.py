"""The screen of `pullfill top`: what it shows, and that it fits."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from pullfill.deploy.top_view import Seen, screen, spark
from pullfill.deploy.view import plain
from pullfill.snapshot import HISTORY_S, Flow, LiveSnapshot, Mark, Point, Stage, WorkerRow
from pullfill.wire import ServerStatus
from tests.support.live_script import DECODE, DRAINING, PREFILL, ScriptedLive


@pytest.fixture(scope="module")
def whole() -> LiveSnapshot:
    return ScriptedLive().snapshot(True)


def shown(
    snapshot: LiveSnapshot | None, width: int = 80, height: int = 60, trouble: str = ""
) -> str:
    seen = Seen()
    if snapshot is not None:
        seen.take(snapshot)
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=height)
    console.print(screen(seen, trouble, height), highlight=False)
    return stream.getvalue()


def test_everything_fits_80_columns_and_the_height_of_the_terminal(whole: LiveSnapshot) -> None:
    for height in (24, 30, 50):
        lines = shown(whole, height=height).splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) < height
    text = shown(whole)
    for part in (*DECODE, *PREFILL, "◆ draining", "TTFT", "goodput", "of work", "TTFT p95", "→"):
        assert part in text, part
    assert f"{DRAINING} drains" in text
    assert "nats does not answer (29 s, over)" in text
    assert "prefilled: remote long_prompt" in text
    assert "prefill" in next(line for line in text.splitlines() if line.startswith("decode worker"))


def test_long_names_are_cut_and_nothing_is_sent_to_the_terminal(whole: LiveSnapshot) -> None:
    odd = "x\x1b]0;owned\x07\x9b" + "y" * 90
    worker = WorkerRow(instance_id=odd, role="decode", state="lost")
    flow = Flow(id=odd, stage=Stage.QUEUE, decode=odd)
    mark = Mark(at=whole.at, kind="lost", who=odd, text=odd)
    changes = {"workers": (worker,), "flows": (flow,), "marks": (mark,), "model": odd}
    text = shown(msgspec.structs.replace(whole, **changes))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert plain(odd).startswith("x?]0;owned??y")


def test_names_are_text_and_no_markup(whole: LiveSnapshot) -> None:
    odd = "[/red] :boom:"
    worker = WorkerRow(instance_id=odd, role="decode", state="lost")
    flow = Flow(id=odd, stage=Stage.QUEUE, decode=odd)
    text = shown(msgspec.structs.replace(whole, workers=(worker,), flows=(flow,)))
    assert text.count(odd) == 3


def test_a_server_that_is_away_and_a_lost_frontend_are_said(whole: LiveSnapshot) -> None:
    nats = ServerStatus(up=False, since_s=3.0, error="h:1: refused")
    away = msgspec.structs.replace(whole, servers={"nats": nats})
    assert "▲ NATS unreachable for 3 s" in shown(away)
    assert "connecting again" in shown(away, trouble="connecting again: http://h:2")
    assert "waiting for the first snapshot" in shown(None)


def test_the_history_grows_with_each_snapshot_and_forgets_the_oldest() -> None:
    seen = Seen()
    first = LiveSnapshot(at=1000.0, frontend="f", model="m", since=1.0, points=(Point(at=995.0),))
    seen.take(first)
    seen.take(msgspec.structs.replace(first, at=1004.0, points=(Point(at=995.0, done=2),)))
    assert [(point.at, point.done) for point in seen.points] == [(995.0, 2)]
    seen.take(msgspec.structs.replace(first, at=1000.0 + HISTORY_S + 1, points=()))
    assert seen.points == []


@pytest.mark.parametrize(
    ("values", "columns", "expected"),
    [
        ([], 4, ""), ([None, None], 4, "  "), ([0.0, 0.0], 4, "▁▁"),
        ([1.0, 2.0, None, 4.0], 4, "▂▄ █"), ([1.0, 4.0, 2.0, None], 2, "█▄"),
    ],
)  # fmt: skip
def test_a_spark_shows_the_highest_of_each_column(
    values: list[float | None], columns: int, expected: str
) -> None:
    assert spark(values, columns) == expected
