"""How `pullfill explain` tells what happened to a request, and what it says if nobody knows."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pullfill import wire
from pullfill.config import ClusterRef
from pullfill.deploy import explain as command
from pullfill.deploy.explain import explain, trace
from pullfill.deploy.local_servers import free_port
from pullfill.errors import ConfigError, UnavailableError
from pullfill.snapshot import Explained
from tests.support.http_stub import serving
from tests.support.state_dir import entry, recorded
from tests.support.workers import record

REMOTE = Explained(
    request_id="cmpl-1", path="remote", reason="long_prompt", prompt_tokens=2000,
    prefix_hit_tokens=512, remote_tokens=1487, decode_instance="decode-a",
    prefill_instance="prefill-b", attempts=2, kv_bytes=3 << 20,
    timings_ms=wire.Timings(route=0.2, queue=1.0, prefill=700.0, first_token=720.0),
)  # fmt: skip


def _text(record: Explained) -> str:
    console = Console(width=100)
    with console.capture() as said:
        console.print(trace(record))
    return said.get()


NOWHERE_URL = "http://127.0.0.1:1"
NOWHERE = {"path": "none", "decode_instance": "", "reason": "", "timings_ms": wire.Timings()}
PART = msgspec.structs.replace(REMOTE, request_id="1_cmpl-1")
EVERYTHING = msgspec.structs.replace(
    REMOTE, remote_tokens=0, prefix_hit_tokens=32, fetched_tokens=1920, fetched_from="decode-2",
    fetch="fetched", expected_s=wire.Expected(queue=0.5, prefill=2.0, timeout=30.0),
    predicted_ms=wire.PredictedMs(remote=812.4, local=1500.0), outcome_ms=790.0,
    outage="NATS unreachable", migrated_from=("decode-x", "decode-y"), migrated_tokens=17,
    transport="tcp", why_not_better=("shm: it is on another host",), parts=(PART,), more_parts=3,
)  # fmt: skip


def test_the_trace_says_all_that_is_known() -> None:
    text = _text(EVERYTHING)
    for part in (
        "= 32 cached + 1920 fetched + 0 prefilled remotely + 48 locally",
        "prefix held by decode-2: fetched",
        "expected: 0.50 s in the queue, 2.00 s to compute, ? s to write the KV; given up after 30",
        "after the decision: remote 812 ms, local 1500 ms expected; it was 790 ms",
        "at that time: NATS unreachable",
        "continued after: decode-x, decode-y, from 17 tokens on",
        "cmpl-1",
        "decode-a",
        "prefill-b (2 attempts)",
        "700.0 ms",
        "3.1 MB over tcp",
        "not over shm: it is on another host",
        "beams: 1, and 3 that are not kept",
        "1_cmpl-1: 2000 tokens, prefilled by a prefill",
    ):
        assert part in text
    bars = {line.split()[0]: line.count("█") for line in text.splitlines() if "█" in line}
    assert bars["first_token"] > bars["queue"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "by a prefill worker (reason: long_prompt)"),
        ({}, "2000 tokens = 512 cached + 1487 prefilled remotely + 1 locally"),
        ({"path": "local", "fallback": "timeout"}, "done locally: timeout"),
        (
            {"state": "failed", "status": 200, "error": "lost", "path": "unknown", "reason": ""},
            "failed (after its answer had begun): lost\n  its decode worker has not told",
        ),
        (
            NOWHERE | {"state": "failed", "status": 429, "error": "9 are being served"},
            "failed (HTTP 429): 9 are being served\n  sent to no decode worker\n",
        ),
        ({"state": "cancelled"}, "its client left"),
        ({"state": "failed"}, "  failed: no reason is known\n"),
        ({"path": "unknown"}, "its remote prefill has not ended (reason: long_prompt)"),
    ],
)
def test_requests_that_went_another_way(changes: dict[str, Any], said: str) -> None:
    assert said in _text(msgspec.structs.replace(REMOTE, **changes))


class TestAsking:
    def test_the_frontend_that_knows_the_request_tells_it(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        told = json.loads(msgspec.json.encode(REMOTE))
        known = "/pullfill/requests/cmpl-1%2F"
        with (
            serving(lambda *_: (404, {})) as first,
            serving(lambda path, _: (200 if path == known else 404, told)) as second,
        ):
            ref = _cluster(tmp_path, first, second)
            assert explain(ref, "cmpl-1/", as_json=True) == 0
            assert json.loads(capsys.readouterr().out) == told
            assert explain(ref, "cmpl-1/", as_json=False) == 0
            assert "by a prefill worker" in capsys.readouterr().out
            with pytest.raises(
                ConfigError, match="no frontend and no decode worker knows request 'cmpl-2'"
            ):
                explain(ref, "cmpl-2", as_json=False)

    def test_a_decode_worker_tells_what_no_frontend_knows(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = json.loads(msgspec.json.encode(REMOTE))
        known = {"request": told}, {}
        with (
            serving(lambda *_: (404, {})) as frontend,
            serving(lambda path, _: (200, known["cmpl-1%2F" not in path])) as url,
        ):
            members = [record("decode-1", http=url), record("prefill-1", http=NOWHERE_URL)]
            monkeypatch.setattr(command, "ask_etcd", lambda *_, **__: members)
            for urls in ((frontend,), ("",)):
                assert explain(_cluster(tmp_path, *urls), "cmpl-1/", as_json=True) == 0
                assert json.loads(capsys.readouterr().out) == told
            members.append(record("decode-2", http=NOWHERE_URL))
            with pytest.raises(ConfigError, match=r"no decode worker knows.*decode-2 does not"):
                explain(_cluster(tmp_path, frontend), "cmpl-2", as_json=False)
            del members[0]
            with pytest.raises(UnavailableError, match=r"neither.*decode-2 does not answer"):
                explain(_cluster(tmp_path, ""), "cmpl-2", as_json=False)

    def test_a_frontend_that_wants_a_key_says_so(self, tmp_path: Path) -> None:
        with (
            serving(lambda *_: (401, {})) as url,
            pytest.raises(ConfigError, match=f"{url} wants an API key.*api_key_file"),
        ):
            explain(_cluster(tmp_path, url), "x", as_json=False)

    def test_why_no_frontend_answers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        why = "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"

        def refuse(*_: object, **__: object) -> None:
            raise OSError(why)

        monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuse)
        with pytest.raises(UnavailableError, match="SSL_CERT_FILE") as caught:
            explain(_cluster(tmp_path, "https://h:1"), "x", as_json=False)
        assert f"https://h:1/pullfill/requests/x: {why}" in str(caught.value)


def _cluster(directory: Path, *urls: str) -> ClusterRef:
    """A cluster with these frontends, whose etcd is away."""
    etcd = f"http://127.0.0.1:{free_port()}"
    entries = [entry("frontend-0", url=url) for url in urls]
    recorded(directory, *entries, etcd_url=etcd, frontend_url=urls[0])
    return ClusterRef("n", etcd, "nats://h", directory)
