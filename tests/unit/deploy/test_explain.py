"""How `pullfill explain` tells what happened to a request, and what it says if nobody knows."""

from __future__ import annotations

import io
import json
import urllib.request
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from pullfill import wire
from pullfill.config import ClusterRef
from pullfill.deploy.explain import explain, trace
from pullfill.deploy.local_servers import free_port
from pullfill.errors import ConfigError, UnavailableError
from pullfill.snapshot import Explained
from tests.support.http_stub import serving

REMOTE = Explained(
    request_id="cmpl-1", path="remote", reason="long_prompt", prompt_tokens=2000,
    prefix_hit_tokens=512, remote_tokens=1487, decode_instance="decode-a",
    prefill_instance="prefill-b", attempts=2, kv_bytes=3 << 20,
    timings_ms=wire.Timings(route=0.2, queue=1.0, prefill=700.0, first_token=720.0),
)  # fmt: skip


def _text(record: Explained) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(trace(record))
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


def test_the_trace_says_what_was_read_from_another_worker() -> None:
    local = msgspec.structs.replace(
        REMOTE, remote_tokens=0, prefix_hit_tokens=32, fetched_tokens=1920, fetched_from="decode-2",
        fetch="fetched",
    )  # fmt: skip
    text = _text(local)
    assert "2000 tokens = 32 cached + 1920 fetched + 0 prefilled remotely + 48 locally" in text
    assert "prefix held by decode-2: fetched" in text
    assert "prefix held" not in _text(REMOTE)


def test_the_trace_says_how_much_of_the_hit_was_offloaded() -> None:
    text = _text(msgspec.structs.replace(REMOTE, offloaded_tokens=256))
    assert "2000 tokens = 512 cached (256 offloaded) + 1487 prefilled remotely" in text


def test_the_trace_says_what_the_decision_was_made_on() -> None:
    expected = wire.Expected(queue=0.5, prefill=2.0, claim_timeout=10.0, timeout=30.0)
    text = _text(msgspec.structs.replace(REMOTE, expected_s=expected))
    said = "0.50 s in the queue, 2.00 s to compute, ? s to write the KV"
    assert f"expected: {said}; given up after 30 s" in text
    assert "expected" not in _text(REMOTE)


def test_what_the_policy_cost_predicted_and_what_came() -> None:
    predicted = wire.PredictedMs(remote=812.4, local=1500.0)
    record = msgspec.structs.replace(REMOTE, predicted_ms=predicted, outcome_ms=790.0)
    said = "remote 812 ms, local 1500 ms expected; it was 790 ms"
    assert f"first token after the decision: {said}" in _text(record)


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


def test_the_trace_of_an_answer_that_changed_its_decode_worker() -> None:
    left = ("decode-x", "decode-y")
    text = _text(msgspec.structs.replace(REMOTE, migrated_from=left, migrated_tokens=17))
    assert "continued after: decode-x, decode-y, from 17 tokens on" in text


def test_the_trace_of_a_request_names_its_transport() -> None:
    told = Explained(
        request_id="r", path="remote", reason="long_prompt", prompt_tokens=9, prefix_hit_tokens=0,
        remote_tokens=8, decode_instance="d", prefill_instance="p", attempts=1, kv_bytes=2048,
        transport="tcp", why_not_better=("shm: it is on another host",),
    )  # fmt: skip
    text = _text(told)
    assert "2.0 KiB over tcp" in text
    assert "not over shm: it is on another host" in text


def test_the_trace_of_a_request_that_failed_or_is_under_way() -> None:
    nowhere = {"path": "none", "decode_instance": "", "reason": "", "timings_ms": wire.Timings()}
    refused = msgspec.structs.replace(
        REMOTE, **nowhere, state="failed", status=429, error="9 requests are being served"
    )
    assert _text(refused).splitlines() == [
        "request cmpl-1", "  failed (HTTP 429): 9 requests are being served",
        "  sent to no decode worker",
    ]  # fmt: skip
    cut = msgspec.structs.replace(
        REMOTE, state="failed", status=200, error="lost", path="unknown", reason=""
    )
    text = _text(cut)
    assert "failed (after its answer had begun): lost" in text
    assert "has not told" in text
    assert "2000 tokens =" not in text
    assert "still running" in _text(msgspec.structs.replace(REMOTE, state="running"))
    assert "its client left" in _text(msgspec.structs.replace(REMOTE, state="cancelled"))


def test_the_trace_lists_other_choices_and_requests_with_the_same_id() -> None:
    part = msgspec.structs.replace(REMOTE, request_id="1_cmpl-1")
    same = msgspec.structs.replace(REMOTE, state="failed", status=500, error="broken")
    text = _text(msgspec.structs.replace(REMOTE, parts=(part,), more_parts=3, same_id=(same,)))
    assert "beams: 1, and 3 that are not kept" in text
    assert "1_cmpl-1: 2000 tokens, prefilled by a prefill worker" in text
    assert "earlier requests with this id: 1" in text
    assert "failed (broken): 2000 tokens" in text


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
            with pytest.raises(ConfigError, match="no frontend knows request 'cmpl-2'"):
                explain(ref, "cmpl-2", as_json=False)

    def test_a_frontend_that_wants_a_key_says_so(self, tmp_path: Path) -> None:
        with (
            serving(lambda *_: (401, {})) as url,
            pytest.raises(ConfigError, match=f"{url} wants an API key.*api_key_file"),
        ):
            explain(_cluster(tmp_path, url), "x", as_json=False)

    @pytest.mark.parametrize(
        ("why", "advice"),
        [
            ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate", "SSL_CERT_FILE"),
            ("Connection refused", "pullfill doctor"),
        ],
    )
    def test_why_no_frontend_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, advice: str
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(why)

        monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuse)
        with pytest.raises(UnavailableError) as caught:
            explain(_cluster(tmp_path, "https://h:1"), "x", as_json=False)
        assert f"https://h:1/pullfill/requests/x: {why}" in str(caught.value)
        assert advice in str(caught.value)


def _cluster(directory: Path, *urls: str) -> ClusterRef:
    """A cluster with these frontends, whose etcd is away."""
    etcd = f"http://127.0.0.1:{free_port()}"
    file = {"namespace": "n", "nats_url": "nats://h", "etcd_url": etcd, "frontend_url": urls[0]}
    entries = [
        {"name": "f", "role": "frontend", "instance_id": "f", "pid": 1, "log": "l", "url": url}
        for url in urls
    ]
    path = directory / "cluster.json"
    path.write_bytes(msgspec.json.encode(file | {"processes": entries}))
    return ClusterRef("n", etcd, "nats://h", directory)
