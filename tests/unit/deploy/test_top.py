"""`pullfill top` against a scripted frontend."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pullfill.config import ClusterRef
from pullfill.deploy import cli, top
from pullfill.deploy import top as command
from pullfill.errors import ConfigError, UnavailableError
from pullfill.frontend.live.page import QUIET_S
from pullfill.net.security import FrontendSecurity, Security
from pullfill.snapshot import Ended, LiveSnapshot
from tests.support.live_script import DECODE, serving

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


def test_the_latest_requests_of_all_frontends_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as one, serving() as other:
        monkeypatch.setattr(command, "frontend_urls", lambda _: [one, NOWHERE, other, one])
        assert top.requests(ref(tmp_path), None, 1000, as_json=True) == 0
        rows = msgspec.json.decode(capsys.readouterr().out, type=list[Ended])
        assert [row.at for row in rows] == sorted(row.at or 0.0 for row in rows)
        assert len(rows) > 50
        assert max(Counter(row.id for row in rows).values()) == 2, "each frontend once"
        assert top.requests(ref(tmp_path), other, 30, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = (line for line in lines if rows[-1].id in line)
    assert ("✓" if rows[-1].good else "✕") in line
    assert f" {rows[-1].path} " in line
    assert "✓ TTFT and ITL within router.ttft_ms" in lines[-2]
    assert "explain" in lines[-1]


def test_the_url_of_a_frontend_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PULLFILL_STATE_DIR", raising=False)
    with serving() as url:
        for words in (["top"], ["requests"]):
            done = CliRunner().invoke(cli.app, [*words, "--url", url])
            assert done.exception is None, done.exception
        assert isinstance(CliRunner().invoke(cli.app, ["requests"]).exception, ConfigError)


def test_no_frontend_tells_of_requests(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no frontend answers"):
        top.requests(ref(tmp_path), NOWHERE, 1, as_json=False)
    with serving(admin=(ADMIN,)) as url, pytest.raises(ConfigError, match="administrators only"):
        top.requests(ref(tmp_path), url, 1, as_json=False)


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


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no frontend answers"):
        next(command._snapshots(ref(tmp_path, NOWHERE), None))


def test_comments_between_snapshots_keep_the_stream_alive(tmp_path: Path) -> None:
    assert (command._TIMEOUT.read or 0.0) >= 2 * QUIET_S
    with serving() as url:
        snapshots = command._snapshots(ref(tmp_path, url), None)
        assert all(isinstance(next(snapshots), LiveSnapshot) for _ in range(2))
        snapshots.close()


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
