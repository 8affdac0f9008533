"""`pullfill top` against a scripted frontend."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy import cli
from pullfill.deploy import top as command
from pullfill.deploy.top import Seen, screen, spark
from pullfill.deploy.view import plain
from pullfill.errors import ConfigError
from pullfill.net.security import FrontendSecurity, Security
from pullfill.snapshot import HISTORY_S, Flow, LiveSnapshot, Mark, Point, Stage, WorkerRow
from pullfill.wire import ServerStatus
from tests.support.live_script import DECODE, DRAINING, PREFILL, ScriptedLive, serving

ADMIN = "admin-key-0123456789"
NOWHERE = "http://127.0.0.1:1"


def ref(tmp_path: Path, url: str = "", admin: str = "") -> ClusterRef:
    """A cluster whose state directory names this frontend."""
    cluster = {
        "namespace": "n", "nats_url": "nats://127.0.0.1:1", "etcd_url": NOWHERE,
        "frontend_url": url, "processes": [],
    }  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    security = Security()
    if admin:
        key = tmp_path / "admin.key"
        key.write_text(admin + "\n")
        key.chmod(0o600)
        security = Security(frontend=FrontendSecurity(admin_key_file=str(key)))
    return ClusterRef("n", NOWHERE, "nats://127.0.0.1:1", tmp_path, security)


def test_one_screen_is_printed_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as url:
        assert command.top(ref(tmp_path, url)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(DECODE[0]) for line in lines)


def test_the_url_of_a_frontend_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PULLFILL_STATE_DIR", raising=False)
    with serving() as url:
        done = CliRunner().invoke(cli.app, ["top", "--url", url])
        assert done.exception is None, done.exception
        assert isinstance(CliRunner().invoke(cli.app, ["top"]).exception, ConfigError)


def test_the_administrators_key_goes_to_frontends_that_the_user_knows_only(tmp_path: Path) -> None:
    """Who may write to etcd can announce a frontend, and would get the key."""
    here = ref(tmp_path, "http://mine:1/", ADMIN)
    bearer = {"Authorization": f"Bearer {ADMIN}"}
    assert list(command._shown_to(here, "http://mine:1", False)) == [{}, bearer]
    assert list(command._shown_to(here, "http://announced:1", False)) == [{}]
    assert list(command._shown_to(here, "http://named:1", True)) == [{}, bearer]


def test_a_frontend_with_keys_wants_one(tmp_path: Path) -> None:
    with serving(admin=(ADMIN,)) as url:
        snapshots = command._snapshots(ref(tmp_path, url, ADMIN), None)
        assert isinstance(next(snapshots), LiveSnapshot)
        snapshots.close()
        with pytest.raises(ConfigError, match="admin_key_file"):
            next(command._snapshots(ref(tmp_path, url), None))
        with pytest.raises(ConfigError, match=f"administrators only.* --url {url}"):
            next(command._snapshots(ref(tmp_path), url))


def test_a_frontend_that_goes_away_is_looked_for_again(tmp_path: Path) -> None:
    with serving() as url:
        snapshots = command._snapshots(ref(tmp_path, url), None, again_s=0.05)
        first = next(snapshots)
        assert isinstance(first, LiveSnapshot)
        assert first.whole
    said = next(found for found in snapshots if isinstance(found, str))
    assert said.startswith("connecting again: ")
    with serving(int(url.rpartition(":")[2])):
        again = next(found for found in snapshots if isinstance(found, LiveSnapshot))
        assert again.whole
        snapshots.close()


# ------------------------------------------------------------------ the screen


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
    for part in (
        *DECODE,
        *PREFILL,
        "◆ draining",
        "TTFT",
        "goodput",
        "of work",
        "TTFT p95",
        "queue",
    ):
        assert part in text, part
    assert f"{DRAINING} drains" in text
    assert "nats does not answer (29 s, over)" in text


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
