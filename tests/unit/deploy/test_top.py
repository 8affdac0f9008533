"""`pullfill top` against a scripted frontend."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy import cli
from pullfill.deploy import top as command
from pullfill.deploy.top import screen
from pullfill.errors import ConfigError, UnavailableError
from pullfill.net.security import FrontendSecurity, Security
from pullfill.snapshot import Flow, LiveSnapshot, Stage, WorkerRow
from pullfill.wire import QueueStatus, ServerStatus
from tests.support.certificates import make_certificates
from tests.support.live_script import DECODE, PREFILL, ScriptedLive, serving
from tests.support.state_dir import recorded

ADMIN = "admin-key-0123456789"
NOWHERE = "http://127.0.0.1:1"


def ref(tmp_path: Path, url: str = "", admin: str = "") -> ClusterRef:
    """A cluster whose state directory names this frontend."""
    recorded(tmp_path, nats_url="q", etcd_url=NOWHERE, frontend_url=url)
    key = tmp_path / "admin.key"
    key.write_text(admin + "\n")
    key.chmod(0o600)
    frontend = FrontendSecurity(admin_key_file=str(key) if admin else None)
    return ClusterRef("n", NOWHERE, "q", tmp_path, Security(frontend=frontend))


def test_one_screen_is_printed_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as url:
        assert command.top(ref(tmp_path, url)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(DECODE[0]) for line in lines)


def test_https_with_an_authority_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_certificates(tmp_path / "tls")
    with serving(tls=own) as url:
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            command.top(ref(tmp_path, url), url=url)
        monkeypatch.setenv("SSL_CERT_FILE", str(own.ca))
        assert command.top(ref(tmp_path, url), url=url) == 0


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
        with closing(command._snapshots(ref(tmp_path, url, ADMIN), None)) as snapshots:
            assert next(snapshots)[1] == ""
        with pytest.raises(ConfigError, match="admin_key_file"):
            next(command._snapshots(ref(tmp_path, url), None))
        with pytest.raises(ConfigError, match=f"administrators only.* --url {url}"):
            next(command._snapshots(ref(tmp_path), url))


def test_a_frontend_that_goes_away_is_looked_for_again(tmp_path: Path) -> None:
    with serving() as url:
        snapshots = command._snapshots(ref(tmp_path, url), None, again_s=0.05)
        first, _ = next(snapshots)
    last, why = next(found for found in snapshots if found[1])
    assert why.startswith("connecting again: ")
    assert last.frontend == first.frontend
    with closing(snapshots), serving(int(url.rpartition(":")[2])):
        assert next(found for found, why in snapshots if not why).at > last.at


def test_without_a_frontend_it_shows_what_the_workers_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = WorkerRow(instance_id="decode-1", role="decode", state="ready", model="m", running=3)
    queue = QueueStatus(depth_jobs=2, depth_tokens=900)
    told = LiveSnapshot(at=1.0, frontend="", model="m", workers=(row,), queue=queue)

    async def tell(_: ClusterRef) -> LiveSnapshot:
        return told

    monkeypatch.setattr(command, "frontend_urls", lambda _: ())
    monkeypatch.setattr(command, "_of_workers", tell)
    assert command.top(ref(tmp_path), once=True) == 0
    said = capsys.readouterr().out
    for part in ("m as workers tell", "no frontend is known", "2 jobs, 900 tokens", "decode-1"):
        assert part in said


@pytest.fixture(scope="module")
def whole() -> LiveSnapshot:
    return ScriptedLive().snapshot()


def shown(snapshot: LiveSnapshot, height: int = 60, trouble: str = "", **changes: object) -> str:
    console = Console(width=80, height=height)
    with console.capture() as said:
        found = msgspec.structs.replace(snapshot, **changes)
        console.print(screen(found, trouble, height), highlight=False)
    text = said.get()
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_everything_fits_80_columns_and_the_height_of_the_terminal(whole: LiveSnapshot) -> None:
    for height in (24, 30, 50):
        assert len(shown(whole, height).splitlines()) < height
    text = shown(whole)
    for part in (*DECODE, *PREFILL, "draining", "TTFT", "goodput", "of work", "queue"):
        assert part in text, part


def test_names_are_text_and_nothing_is_sent_to_the_terminal(whole: LiveSnapshot) -> None:
    odd = "[/red] :boom:\x1b]0;owned\x07\x9b"
    worker = WorkerRow(instance_id=odd, role="decode", state="lost")
    flow = Flow(id=odd, stage=Stage.QUEUE, decode="[/red] :boom:")
    text = shown(whole, workers=(worker,), flows=(flow,), model=odd)
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert text.count("[/red] :boom:") >= 3


def test_a_server_that_is_away_and_a_lost_frontend_are_said(whole: LiveSnapshot) -> None:
    nats = ServerStatus(up=False, since_s=3.0, error="h:1: refused")
    text = shown(whole, trouble="connecting again: http://h:2", servers={"nats": nats})
    assert "▲ NATS unreachable for 3 s" in text
    assert "connecting again" in text
