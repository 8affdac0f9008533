"""The frontend's pure parts: routing, explain ids, metrics merge, wire helpers, version check."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pullfill import wire
from pullfill.engine import check, front_wire
from pullfill.errors import BadMessage, ConfigError, IncompatibleError
from pullfill.frontend.balancer import RoundRobin
from pullfill.frontend.cluster import merge_metrics
from pullfill.frontend.explain import ExplainStore, Trace, key_of
from pullfill.frontend.main import bind, url_of
from pullfill.wire import ExplainRecord


@dataclass
class Worker:
    instance_id: str


def test_round_robin_gives_each_worker_a_turn_and_keeps_its_place_when_one_leaves() -> None:
    router = RoundRobin()
    a, b, c = Worker("a"), Worker("b"), Worker("c")
    assert [router.choose(None, [c, a, b]).instance_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert router.choose(None, [a, c]) is c
    assert router.choose(None, [a, c]) is a


def record(request_id: str) -> ExplainRecord:
    return ExplainRecord(
        request_id=request_id,
        path="remote",
        reason="long_prompt",
        prompt_tokens=9,
        prefix_hit_tokens=0,
        remote_tokens=8,
        decode_instance="d",
    )


@pytest.mark.parametrize(
    ("request_id", "external_id", "key"),
    [
        ("chatcmpl-x-12345678", "chatcmpl-x", "chatcmpl-x"),
        ("2_chatcmpl-x-12345678", "chatcmpl-x", "2_chatcmpl-x"),
        ("cmpl-x-0-12345678", "cmpl-x-0", "cmpl-x-0"),
        ("0_cmpl-x-1-12345678", "cmpl-x-1", "0_cmpl-x-1"),
        ("7_mine-12345678", "7_mine", "7_mine"),
        ("bare", None, "bare"),
    ],
)
def test_explain_keys_drop_vllms_random_tail_and_keep_the_choice(
    request_id: str, external_id: str | None, key: str
) -> None:
    assert key_of(request_id, external_id) == key


@pytest.mark.parametrize("key", ["cmpl-x", "cmpl-x-0", "0_cmpl-x", "0_cmpl-x-0", "cmpl-x_0"])
def test_a_response_id_finds_its_first_part(key: str) -> None:
    store = ExplainStore()
    store.open("w", Trace(key, 0.5, 7.0))
    store.put(record("w"))
    found = store.get("cmpl-x")
    assert found is not None
    assert found.request_id == "cmpl-x"
    assert (found.timings_ms.route, found.timings_ms.first_token) == (0.5, 7.0)
    assert store.get("other") is None


def test_explain_store_is_bounded_and_ignores_requests_it_never_sent() -> None:
    store = ExplainStore(limit=3)
    store.put(record("stranger"))
    assert store.get("stranger") is None
    for i in range(5):
        store.open(f"w{i}", Trace(f"k{i}"))
        store.put(record(f"w{i}"))
    assert [store.get(f"k{i}") is not None for i in range(5)] == [False, False, True, True, True]


OWN = """# HELP up_total Things
# TYPE up_total counter
up_total{model="m"} 3.0
# HELP pullfill_h Times
# TYPE pullfill_h histogram
pullfill_h_bucket{le="1.0"} 1.0
pullfill_h_bucket{le="+Inf"} 1.0
pullfill_h_count 1.0
pullfill_h_sum 0.5
"""
WORKER = """# HELP pullfill_h Times
# TYPE pullfill_h histogram
pullfill_h_bucket{le="1.0"} 2.0
pullfill_h_bucket{le="+Inf"} 2.0
pullfill_h_count 2.0
pullfill_h_sum 0.25
# HELP pullfill_queue_depth_jobs Jobs
# TYPE pullfill_queue_depth_jobs gauge
pullfill_queue_depth_jobs 4.0
"""


def test_merged_metrics_have_each_family_once_and_say_whose_sample_it_is() -> None:
    one = {"instance_id": "decode-1", "role": "decode"}
    two = {"instance_id": 'odd"\\name', "role": "prefill"}
    text = merge_metrics([({}, OWN), (one, WORKER), (two, WORKER)])
    assert text.count("# TYPE pullfill_h histogram") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    depth = families["pullfill_queue_depth_jobs"].samples
    assert {(s.labels["instance_id"], s.labels["role"], s.value) for s in depth} == {
        ("decode-1", "decode", 4.0),
        ('odd"\\name', "prefill", 4.0),
    }
    buckets = [s for s in families["pullfill_h"].samples if s.name == "pullfill_h_bucket"]
    assert len(buckets) == 6
    assert {s.labels.get("role") for s in buckets} == {None, "decode", "prefill"}
    assert families["up"].samples[0].labels == {"model": "m"}


@given(st.lists(st.text(max_size=60), max_size=8))
def test_no_text_of_a_worker_spoils_the_page(lines: list[str]) -> None:
    text = merge_metrics([({}, OWN), ({"instance_id": "i", "role": "decode"}, "\n".join(lines))])
    own = [line for line in OWN.splitlines() if not line.startswith("#")]
    assert set(own) <= set(text.splitlines())
    assert text.count("# TYPE up_total counter") == 1


def hello(**changes: str) -> front_wire.FrontendHello:
    base = front_wire.FrontendHello(frontend_instance="f", vllm_version="0.32.0", model="m")
    return msgspec.structs.replace(base, **changes)


def test_hello_is_refused_with_the_field_that_differs_and_both_values() -> None:
    assert (
        front_wire.refuse_hello(hello(), vllm_version="0.32.0+cpu", models=["m", "/path"]) is None
    )
    reason = front_wire.refuse_hello(
        hello(vllm_version="0.31.0"), vllm_version="0.32.0", models=["m"]
    )
    assert reason is not None
    assert all(word in reason for word in ("vllm_version", "0.31.0", "0.32.0"))
    reason = front_wire.refuse_hello(hello(model="x"), vllm_version="0.32.0", models=["m"])
    assert reason is not None
    assert "model differs" in reason


def test_hello_survives_the_wire_and_another_version_does_not() -> None:
    assert wire.decode(wire.encode(hello()), front_wire.FrontendHello) == hello()
    other = msgspec.msgpack.encode({**msgspec.to_builtins(hello()), "v": 99})
    with pytest.raises(BadMessage):
        wire.decode(other, front_wire.FrontendHello)


@given(st.binary(max_size=64))
def test_id_lists_from_the_wire_are_strict(data: bytes) -> None:
    try:
        ids = front_wire.decode_ids(data)
    except BadMessage:
        return
    assert all(isinstance(item, str) for item in ids)


def test_refusal_text_is_printable_whatever_was_sent() -> None:
    assert front_wire.text_of(b"no\x1b[31m \xff" + b"x" * 9999).isprintable()


def test_attempt_ids_differ() -> None:
    assert front_wire.attempt_id("r", 0) == "r"
    assert len({front_wire.attempt_id("r", n) for n in range(4)}) == 4


def test_another_vllm_is_refused_naming_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_vllm", lambda: "0.33.1")
    with pytest.raises(IncompatibleError, match=r"0\.33\.1.*0\.32\.0"):
        check.require_version()
    monkeypatch.setattr(check, "installed_vllm", lambda: None)
    with pytest.raises(IncompatibleError, match=r"not installed.*make install"):
        check.require_version()
    monkeypatch.setattr(check, "installed_vllm", lambda: "0.32.0+cpu")
    assert check.require_version() == "0.32.0+cpu"


def test_pickle_on_the_wire_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_vllm", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(IncompatibleError, match="pickle"):
        check.require_version()


@pytest.mark.parametrize(
    "path", ["Nothing", "FrontendHello:nothing", "FrontendCodec.nothing", "HELO:field"]
)
def test_a_missing_internal_name_is_named(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(check, "installed_vllm", lambda: "0.32.0")
    check.require_names(
        {"pullfill.engine.front_wire": ("FrontendHello:model", "FrontendCodec.outputs")}
    )
    with pytest.raises(IncompatibleError, match=r"pullfill\.engine\.front_wire"):
        check.require_names({"pullfill.engine.front_wire": (path,)})


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)


def test_two_frontends_that_start_together_cannot_share_a_port() -> None:
    with bind("127.0.0.1", 0) as first:
        where = f"127.0.0.1:{first.getsockname()[1]}"
        assert (url_of(first, tls=False), url_of(first, tls=True)) == (
            f"http://{where}",
            f"https://{where}",
        )
        with pytest.raises(ConfigError):
            bind("127.0.0.1", first.getsockname()[1])
