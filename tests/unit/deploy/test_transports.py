"""What people read about transports: doctor's lines, a request trace; the flags that choose."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pullfill import wire
from pullfill.deploy import report, transports
from pullfill.deploy.machine import FAIL, OK, WARN
from pullfill.deploy.servers import free_port
from pullfill.errors import ConfigError
from pullfill.options import check_address, parse_transports
from pullfill.registry.orders import LiveWorker
from tests.support.http_stub import serving
from tests.support.workers import record


def live(instance_id: str, http: str) -> LiveWorker:
    return LiveWorker(record(instance_id, http=http), 1, 1)


def test_this_machines_transports_are_found_by_looking() -> None:
    (finding,) = transports.transports()
    assert finding.level == OK
    assert "shm" in finding.what
    assert "tcp" in finding.what


@pytest.mark.parametrize(
    ("code", "level"),
    [('print(\'{"shm": "no"}\')', FAIL), ("print('x')", WARN), ("raise SystemExit(3)", WARN)],
)
def test_a_survey_that_finds_nothing_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, code: str, level: str
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{transports.sys.executable}\n{code}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(transports.sys, "executable", str(fake))
    (finding,) = transports.transports()
    assert finding.level == level
    assert finding.advice


def test_each_pair_of_workers_has_its_line() -> None:
    route = {"transport": "tcp", "why_not_better": ["shm: on another host"]}
    told = {"routes": {"decode-a": route}, "load": {}}
    with serving(lambda path, _: (200, told) if path == "/status" else (404, {})) as url:
        names = ("decode-a", "decode-b", "prefill-a", "frontend-a")
        used, unused = transports.pairs([live(name, url) for name in names])
    assert used.what == "prefill-a writes to decode-a over tcp"
    assert used.advice == "not shm: on another host"
    assert "decode-b yet" in unused.what


@pytest.mark.parametrize("answer", [(200, {"routes": 3}), (200, None), (500, {}), None])
def test_a_worker_that_answers_nonsense_is_no_failure(answer: tuple[int, Any] | None) -> None:
    with serving(lambda *_: answer or (200, {})) as url:
        gone = f"http://127.0.0.1:{free_port()}"
        there = url if answer else gone
        found = list(transports.pairs([live("decode-a", url), live("prefill-a", there)]))
    assert [f.level for f in found] == ([OK] if answer == (200, {"routes": 3}) else [])


def test_many_pairs_are_cut_short() -> None:
    with serving(lambda *_: (200, {})) as url:
        workers = [live(f"{role}-{n}", url) for role in ("decode", "prefill") for n in range(9)]
        found = list(transports.pairs(workers))
    assert len(found) == 33
    assert "more" in found[-1].what


def test_the_trace_of_a_request_names_its_transport() -> None:
    told = wire.ExplainRecord(
        request_id="r", path="remote", reason="long_prompt", prompt_tokens=9, prefix_hit_tokens=0,
        remote_tokens=8, decode_instance="d", prefill_instance="p", attempts=1, kv_bytes=2048,
        transport="tcp", why_not_better=("shm: it is on another host",),
    )  # fmt: skip
    stream = io.StringIO()
    Console(file=stream, width=200).print(report.trace(told))
    text = stream.getvalue()
    assert "2.0 KiB over tcp" in text
    assert "not over shm: it is on another host" in text


# --------------------------------------------------------------------------- flags


def test_transports_flag() -> None:
    assert parse_transports(None) is None
    assert parse_transports("tcp, shm") == {"tcp", "shm"}
    for wrong in ("", " , ", "udp", "shm,udp"):
        with pytest.raises(ConfigError, match="cuda_ipc, shm, nccl, nixl, tcp"):
            parse_transports(wrong)


@pytest.mark.parametrize("given", ["tcp://h:1", "h:1"])
def test_an_address_to_publish(given: str) -> None:
    assert check_address("--advertise-kv", given) == "tcp://h:1"
    assert check_address("--advertise-kv", None) is None


@pytest.mark.parametrize("wrong", ["", "h", "tcp://h", "h:x", ":1", "h:0", "h:65536", "a#b:1"])
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--advertise-kv"):
        check_address("--advertise-kv", wrong)
