"""What `status` and `doctor` tell of a cluster, which frontend they ask, and what it is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID

import msgspec
import pytest
from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy import doctor, members
from pullfill.deploy.local_servers import free_port
from pullfill.deploy.machine import FAIL, WARN
from pullfill.deploy.state import StateDir
from pullfill.deploy.status import (
    load_lines,
    process_lines,
    processes,
    state_lines,
    status,
    workers_table,
)
from pullfill.errors import RegistryUnavailable, UnavailableError
from pullfill.net import http_proof
from pullfill.net.security import FrontendSecurity, Security
from pullfill.options import ClusterOptions
from pullfill.registry.client import EtcdClient
from pullfill.snapshot import Cluster, WorkerRow
from tests.support.http_stub import serving
from tests.support.state_dir import entry, recorded
from tests.support.workers import compat, record


def test_status_says_what_is_away_and_how_old_the_rest_is() -> None:
    up = {"up": True, "since_s": 9.0, "error": None}
    away = {"up": False, "since_s": 12.3, "error": "nats://h:1: refused"}
    queue = {
        "depth_jobs": 7, "depth_tokens": 90, "in_flight": 5, "oldest_age_s": 2.0, "age_s": 0.31,
    }  # fmt: skip
    state: dict[str, Any] = {"workers": [], "workers_age_s": 40.2, "queue": queue}

    def said(nats: dict[str, Any], etcd: dict[str, Any], **more: Any) -> list[str]:
        whole = state | {"servers": {"nats": nats, "etcd": etcd}} | more
        return [text.plain for text in state_lines(msgspec.convert(whole, Cluster))]

    counted = "queue: 7 jobs (90 tokens), 5 in flight, oldest 2.0 s (counted 0.3 s ago)"
    assert said(up, up) == ["NATS and etcd answer", counted]
    assert said(away, up)[0] == "NATS unreachable for 12 s: nats://h:1: refused"
    assert said(up, away | {"error": "http://h:2: refused"}) == [
        "etcd unreachable for 12 s: http://h:2: refused",
        "the list of workers is 40 s old",
        counted,
    ]
    row = {
        "instance_id": "p",
        "role": "prefill",
        "state": "ready",
        "troubles": ["no decode worker"],
    }
    assert said(up, up, workers=[row])[-1] == "p: no decode worker"


def test_status_asks_only_the_frontend_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {"/pullfill/status": 200}
    told = {"workers": [], "queue": None}
    # No etcd is asked: there is none at this URL.
    ref = ClusterOptions(state_dir=None).find_to_ask("http://h")
    with serving(lambda path, _: (codes[path], told)) as url:
        assert status(ref, f"{url}/", as_json=True) == 0
        assert json.loads(capsys.readouterr().out).items() >= told.items()
        for code, advice in ((401, "api_key_file"), (404, "the URL of a frontend")):
            codes["/pullfill/status"] = code
            with pytest.raises(UnavailableError, match=f"{url}/pullfill/status answers.*{advice}"):
                status(ref, url, as_json=True)
    with pytest.raises(UnavailableError, match=url):
        status(ref, url, as_json=True)


def test_status_fits_80_columns_and_shortens_no_instance_id() -> None:
    row: dict[str, Any] = {"role": "decode", "model": "demo", "pid": 4194304, "running": 3}
    load = {"running": 3, "kv_blocks": 200, "open_jobs": 0, "steps_s": 0.12345, "prefix": {"a": 9}}
    host = "a-host-with-a-name-that-is-far-too-long.example.com"
    rows = [
        row | {"instance_id": "decode-40f1a16d", "state": "ready", "host": "10.0.0.12",
               "load": load, "restarts": 2, "kv": 0.25, "waiting": 12},
        row | {"instance_id": "decode-42f1a16d", "state": "draining", "host": host},
    ]  # fmt: skip
    shown = msgspec.convert(rows, list[WorkerRow])
    console = Console(width=80)
    with console.capture() as said:
        console.print(workers_table(shown))
    _, first, second = said.get().splitlines()
    assert max(len(first), len(second)) <= 80
    assert first.split() == [
        "decode-40f1a16d", "decode", "ready", "25", "%", "3", "12", "10.0.0.12", "4194304",
    ]  # fmt: skip
    assert second.startswith("decode-42f1a16d decode draining")
    (line,) = load_lines([*shown, msgspec.structs.replace(shown[0], role="prefill")])
    assert line.plain == "decode-40f1a16d: restarts=2 steps_s=0.123"
    # Stock vLLM names its engine by a UUID.
    long = msgspec.structs.replace(shown[0], instance_id=f"decode-{UUID(int=0)}")
    with console.capture() as said:
        console.print(workers_table([long]))
    head, row_of_long = said.get().splitlines()
    assert max(len(head), len(row_of_long)) <= 80
    assert row_of_long.split()[:7] == [long.instance_id, *first.split()[1:7]]


def test_status_and_doctor_name_what_was_drained(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    recorded(tmp_path, entry("prefill-0"), nats_url="q", etcd_url="e")
    state.leaving_of("prefill-1").touch()
    ref = ClusterRef("n", "e", "q", tmp_path)
    told, *_ = process_lines(processes(ref))
    assert told.startswith("prefill-0 was drained. To start another: docs/operations.md")
    assert next(found.what for found in doctor.processes(ref)) == told


# ------------------------------------------------------------------ pullfill doctor


@pytest.mark.essential
def test_workers_that_do_not_fit() -> None:
    other = record("prefill-p", compat=compat(dtype="bfloat16"))
    found = list(doctor.fit([record("decode-d"), other]))
    assert found[-1].level == FAIL
    assert "decode-d and prefill-p cannot exchange KV: dtype" in found[-1].what
    assert found[-1].advice
    assert [finding.level for finding in doctor.fit([])] == [FAIL, WARN]
    assert list(doctor.fit([], by_stock=True)) == []


def test_dead_letters_without_nats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says that it is down, and no library prints tracebacks."""
    monkeypatch.setattr(members, "ask_etcd", lambda *_, **__: {})  # an etcd without a key
    login = "user:s3cr3t@127.0.0.1"
    ref = ClusterRef("ns", f"http://{login}:1", f"nats://{login}:{free_port()}")
    told = [f.what for f in doctor.cluster(ref)]
    assert "etcd answers at http://127.0.0.1:1" in told
    assert "s3cr3t" not in str(told)
    assert "no frontend" in told
    assert sum("NATS" in what for what in told) == 1
    assert not any("dead letters" in what for what in told)
    (finding,) = doctor.dead_letters(ref)
    assert "cannot be counted" in finding.what
    assert not any(record.exc_info for record in caplog.records)


# ------------------------------------------------------------------ who is asked


def test_the_frontend_of_the_state_directory_is_asked_before_etcd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With etcd away it knows more than etcd."""
    recorded(tmp_path, etcd_url="http://h", frontend_url="f")
    asked: list[object] = []

    async def connect(url: str, **_: object) -> None:
        asked.append(url)
        raise RegistryUnavailable("away")

    monkeypatch.setattr(EtcdClient, "connect", connect)
    urls = members.frontend_urls(ClusterRef("n", "http://h", "nats://h", tmp_path))
    assert (next(urls), asked) == ("f", [])
    assert list(urls) == []
    assert asked == ["http://h"]
    for namespace, etcd in (("n", "http://other"), ("other", "http://h")):
        ref = ClusterRef(namespace, etcd, "nats://h", tmp_path)
        assert list(members.frontend_urls(ref)) == [], "the directory is of another cluster"


@pytest.mark.parametrize(
    ("api_key_file", "answer", "shown", "told"),
    [("api", 200, [False], 200), ("api", 401, [False, True], 200), (None, 401, [False], 401)],
    ids=["open", "locked", "without"],
)
def test_a_frontend_is_shown_the_proof_of_an_api_key_when_it_asks_and_never_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    api_key_file: str | None,
    answer: int,
    shown: list[bool],
    told: int,
) -> None:
    """Its address comes from etcd: it may be anybody's."""
    proofs: list[bool] = []
    path, known = "/pullfill/requests/cmpl-ä", [http_proof.digest(b"api-key-0123456789")]

    def locked(asked: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        assert (unquote(asked), "-key-" in str(headers)) == (path, False)
        shown = headers.get(http_proof.HEADER, "").encode()
        proofs.append(http_proof.proven(shown, path, known, time.time()))
        return (200 if proofs[-1] else answer), {"workers": []}

    monkeypatch.chdir(tmp_path)
    for name in ("api", "admin"):
        Path(name).write_text(f"{name}-key-0123456789\nanother-{name}-key-01234\n")
        Path(name).chmod(0o600)
    frontend = FrontendSecurity(api_key_file=api_key_file, admin_key_file="admin")
    ref = ClusterRef("ns", "http://etcd", "nats://nats", security=Security(frontend=frontend))
    with serving(locked) as url:
        assert members.ask_frontend(ref, url, quote(path))[0] == told
    assert proofs == shown


def test_why_a_frontend_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    no = (503, b'{"reasons": ["why"]}')
    answers = [no, no, (200, b"{}"), (503, b"no JSON")]
    monkeypatch.setattr(members, "http_get", lambda url, _: answers.pop(0))
    assert members.why_not_ready("http://f", 0.0) == ["why"]
    assert members.why_not_ready("http://f", 20.0) == []
    assert len(members.why_not_ready("http://f", 0.0)) == 1
