"""Texts about requests and workers, and which frontend is asked for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pullfill import wire
from pullfill.config import ClusterRef
from pullfill.deploy import report
from pullfill.errors import UnavailableError
from pullfill.net.security import FrontendSecurity, Security
from pullfill.registry.orders import LiveWorker

REMOTE = wire.ExplainRecord(
    request_id="cmpl-1", path="remote", reason="long_prompt", prompt_tokens=2000,
    prefix_hit_tokens=512, remote_tokens=1487, decode_instance="decode-a",
    prefill_instance="prefill-b", attempts=2, kv_bytes=3 << 20,
    timings_ms=wire.Timings(route=0.2, queue=1.0, prefill=700.0, first_token=720.0),
)  # fmt: skip


def _text(record: wire.ExplainRecord) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(report.trace(record))
    return stream.getvalue()


def test_the_trace_of_a_remote_prefill() -> None:
    text = _text(REMOTE)
    for part in (
        "cmpl-1", "by a prefill worker (reason: long_prompt)", "2000 tokens = 512 cached",
        "1487 prefilled remotely", "1 locally", "decode-a", "prefill-b (2 attempts)", "3.0 MiB",
        "700.0 ms",
    ):  # fmt: skip
        assert part in text
    assert "claim" not in text
    bars = {line.split()[0]: line.count("█") for line in text.splitlines() if "█" in line}
    assert bars["first_token"] > bars["queue"]
    assert bars["prefill"] > 30


def test_the_trace_says_what_the_decision_was_made_on() -> None:
    expected = wire.Expected(queue=0.5, prefill=2.0, claim_timeout=10.0, timeout=30.0)
    text = _text(msgspec.structs.replace(REMOTE, expected_s=expected))
    said = "0.50 s in the queue, 2.00 s to compute, not known to write the KV; time limit 30 s"
    assert f"expected: {said}" in text
    assert "expected" not in _text(REMOTE)


def test_the_trace_of_a_fallback() -> None:
    text = _text(
        msgspec.structs.replace(
            REMOTE, path="local", fallback="timeout", remote_tokens=0, timings_ms=wire.Timings()
        )
    )
    assert "done locally: timeout" in text
    assert "1488 locally" in text


def test_the_trace_names_the_outage() -> None:
    text = _text(
        msgspec.structs.replace(
            REMOTE, path="local", reason="queue_unavailable", outage="NATS unreachable for 3 s: x"
        )
    )
    assert "(reason: queue_unavailable)" in text
    assert "at that time: NATS unreachable for 3 s: x" in text


def test_status_says_what_is_away_and_how_old_the_rest_is() -> None:
    up = {"up": True, "since_s": 9.0, "error": None}
    away = {"up": False, "since_s": 12.3, "error": "nats://h:1: refused"}
    queue = {
        "depth_jobs": 7, "depth_tokens": 90, "in_flight": 5, "oldest_age_s": 2.0, "age_s": 0.31,
    }  # fmt: skip
    state: dict[str, Any] = {"workers": [], "workers_age_s": 40.2, "queue": queue}

    def said(nats: dict[str, Any], etcd: dict[str, Any], **more: Any) -> list[str]:
        whole = state | {"servers": {"nats": nats, "etcd": etcd}} | more
        return [text.plain for text in report._state_lines(whole)]

    counted = "queue: 7 jobs (90 tokens), 5 in flight, oldest 2.0 s (counted 0.3 s ago)"
    assert said(up, up) == ["NATS and etcd answer", counted]
    assert said(away, up, queue=None) == [
        "NATS unreachable for 12 s: nats://h:1: refused",
        "queue: unknown",
    ]
    assert said(up, away | {"error": "http://h:2: refused"}) == [
        "etcd unreachable for 12 s: http://h:2: refused",
        "the list of workers is 40 s old",
        counted,
    ]
    rows = [{"instance_id": "prefill-1", "troubles": ["no decode worker is connected to it"]}]
    assert said(up, up, workers=rows)[-1] == "prefill-1: no decode worker is connected to it"


def test_the_frontend_of_the_state_directory_is_asked_before_etcd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With etcd away it knows more than etcd."""
    cluster = {"namespace": "n", "nats_url": "nats://h", "etcd_url": "http://h", "processes": []}
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(cluster | {"frontend_url": "f"}))
    asked: list[object] = []

    async def workers(ref: ClusterRef) -> list[LiveWorker]:
        asked.append(ref)
        return []

    monkeypatch.setattr(report, "_workers", workers)
    urls = report.frontend_urls(ClusterRef("n", "http://h", "nats://h", tmp_path))
    assert (next(urls), asked) == ("f", [])
    assert list(urls) == []
    assert len(asked) == 1


def test_the_trace_of_an_answer_that_changed_its_decode_worker() -> None:
    left = ("decode-x", "decode-y")
    text = _text(msgspec.structs.replace(REMOTE, migrated_from=left, migrated_tokens=17))
    assert "continued after: decode-x, decode-y, from 17 tokens on" in text


@pytest.mark.parametrize(
    ("has_keys", "answer", "shown", "told"),
    [(True, 200, [""], 200), (True, 401, ["", "api-key-0123456789"], 200), (False, 401, [""], 401)],
    ids=["open", "locked", "without"],
)
def test_a_frontend_is_shown_no_key_that_it_does_not_ask_for_and_never_an_administrators(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_keys: bool,
    answer: int,
    shown: list[str],
    told: int,
) -> None:
    """Its address comes from etcd: it may be anybody's."""
    keys: list[str] = []

    def http_json(url: str, timeout_s: float, key: str = "") -> tuple[int, Any]:
        keys.append(key)
        return (200 if key else answer), {"workers": []}

    monkeypatch.setattr(report, "http_json", http_json)
    for name in ("api", "admin"):
        (tmp_path / name).write_text(f"{name}-key-0123456789\nanother-{name}-key-01234\n")
        (tmp_path / name).chmod(0o600)
    frontend = FrontendSecurity(
        api_key_file=str(tmp_path / "api") if has_keys else None,
        admin_key_file=str(tmp_path / "admin"),
    )
    ref = ClusterRef("ns", "http://etcd", "nats://nats", security=Security(frontend=frontend))
    assert report._ask_frontend(ref, "http://frontend/pullfill/status")[0] == told
    assert keys == shown


def test_status_shows_names_and_loads_whole_at_80_columns() -> None:
    row: dict[str, Any] = dict.fromkeys(("state", "model", "host", "pid"), "demo")
    rows = [row | {"role": "decode", "instance_id": f"decode-4{n}f1a16d"} for n in range(2)]
    rows[1]["load"] = {"running": 3, "quarantined_blocks": 12, "steps_s": 0.12345}
    stream = io.StringIO()
    Console(file=stream, width=80).print(report._workers_table(rows))
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["decode-40f1a16d", "decode-41f1a16d"]
    assert lines[3:] == ["decode-41f1a16d: running=3 quarantined_blocks=12 steps_s=0.123"]


def test_why_no_frontend_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "https://h:1: [SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"

    def fail(*_: object) -> None:
        raise UnavailableError(why)

    ref = ClusterRef("ns", "http://h", "nats://h")
    monkeypatch.setattr(report, "frontend_urls", lambda _: ["https://h:1"])
    monkeypatch.setattr(report, "_ask_frontend", fail)
    with pytest.raises(UnavailableError, match=r"self-signed certificate.*SSL_CERT_FILE"):
        report.explain(ref, "x", as_json=False)
    why = "http://h:1: Connection refused"
    with pytest.raises(UnavailableError, match=r"Connection refused.*pullfill doctor"):
        report.explain(ref, "x", as_json=False)
