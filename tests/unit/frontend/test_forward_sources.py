"""Flags for stock servers, what names the servers, and the bodies that they get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pullfill import redact
from pullfill.errors import ConfigError
from pullfill.frontend.forward import sources
from pullfill.frontend.forward.layer import check
from pullfill.frontend.forward.servers import prompt_of
from pullfill.frontend.forward.sources import (
    Heartbeats,
    StockEntry,
    bind_heartbeats,
    parse_list,
)  # fmt: skip
from pullfill.options import ForwarderName, FrontendOptions, parse_networks

PREFILL = StockEntry("prefill", "http://a:1", "k:2")
DECODE = StockEntry("decode", "http://b:3")
NETWORKS = parse_networks("10.1.0.0/16, fd00::/64")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"heartbeats": "tcp://192.0.2.1:7"}, "cannot listen on tcp://192.0.2.1:7"),
        ({"heartbeats": "tcp://0.0.0.0:*"}, "--heartbeats-from 10.0.0.0/24"),
        ({"heartbeats_from": NETWORKS}, "--heartbeats-from is for --heartbeats"),
        ({"protocol": "ucx"}, "no protocol is called 'ucx': use one of nixl"),
        ({"forwarder": ForwarderName.PARALLEL}, "parallel cannot use the protocol nixl"),
        ({"servers": "decode"}, "cannot read the server 'decode'"),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(FrontendOptions(**flags))


def test_flags_that_fit() -> None:
    check(FrontendOptions(protocol="mooncake", forwarder=ForwarderName.PARALLEL))
    check(FrontendOptions(heartbeats="tcp://0.0.0.0:*", heartbeats_from=NETWORKS))


def test_a_list() -> None:
    text = "prefill=http://a:1@k:2, decode=b:3/,decode=http://b:3,"
    assert parse_list(text) == (PREFILL, DECODE)
    assert parse_list("") == ()
    commas = "host:h,handshake:1,notify:2"
    moriio = parse_list(f"p=a:1@{commas},d=b:3@{commas}\n")
    assert [entry.kv for entry in moriio] == [commas] * 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://a:1", "give ROLE=URL"),
        ("decode=a:1,b:1", "give ROLE=URL"),
        ("prefill=a:1@k:2,b:1@k:3", "give ROLE=URL"),
        ("frontend=http://a:1", "no role is called 'frontend'"),
        ("decode=ftp://a:1", "give http://HOST:PORT"),
        ("decode=", "give http://HOST:PORT"),
        ("decode=http://a:99999", "give http://HOST:PORT"),
        ("decode=http://a:1/?x", "give http://HOST:PORT"),
        ("decode=http://a:1@k k", "give HOST:PORT"),
        ("p=a:1@k:2,p=a:1@k:3", "http://a:1 is named twice, with different KV addresses"),
        ("decode=http://user:secret@a:1", "'http://user:...' is no address"),
        ("decode=user:secret@a:1", "'user:...' is no address"),
        ("decode=http://user:1secret@a:1", "'http://user:...' is no address"),
        ("http://user:secret@a:1", "'http://user:...': give ROLE=URL"),
        ("user:secret@a:1=http://a:1", "no role is called 'user:...'"),
        ("decode=http://a:1?key=secret", r"'http://a:1\?...' is no address"),
        ("decode=http://a:1@user:secret@k k", "'user:...': give ROLE=URL"),
    ],
)
def test_what_is_wrong_is_told_without_passwords(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        parse_list(text)
    assert "secret" not in str(caught.value)
    # Lines of commands go through `redact`, which takes away what stands before an @ in a URL.
    assert redact.text(str(caught.value)) == str(caught.value)


# --------------------------------------------------------------------------- heartbeats


class Rig:
    """Heartbeats with a clock of the test's. published: each list of servers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.published: list[tuple[StockEntry, ...]] = []
        self.beats = Heartbeats(
            bind_heartbeats("tcp://127.0.0.1:*", ()), NETWORKS, self.published.append, 5.0,
            lambda: self.now,
        )  # fmt: skip

    def hear(self, kind: str, http: str, zmq: str = "", sender: str = "127.0.0.1") -> None:
        beat = {"type": kind, "http_address": http, "zmq_address": zmq, "tp_size": 2}
        self.beats.hear(sender, [msgspec.msgpack.encode(beat)])

    def passes(self, seconds: float) -> None:
        """Look four times a second."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.beats.look()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.beats.socket.close()


def test_a_frontend_that_was_stopped_forgets_nobody(rig: Rig) -> None:
    rig.hear("D", "b:3")
    rig.passes(4)
    rig.now += 60.0
    rig.beats.look()
    assert rig.published == [(DECODE,)]
    rig.passes(2)
    assert rig.published == [(DECODE,), ()]


def test_two_servers_under_one_address_do_not_take_turns(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.hear("P", "a:1", "k:2")
    for _ in range(3):
        rig.hear("P", "a:1", "other:2")
        rig.passes(1)
        rig.hear("P", "a:1", "k:2")
    assert rig.published == [(PREFILL,)]
    (line,) = [record.message for record in caplog.records]
    assert "two prefill servers say that they are http://a:1" in line, "it is said once"
    rig.passes(6)
    rig.hear("P", "a:1", "other:2")
    rig.passes(0.25)
    assert rig.published[-1] == (StockEntry("prefill", "http://a:1", "other:2"),)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([b"\x91" * 4000], "a heartbeat is not taken"),
        ([msgspec.msgpack.encode({"type": "P"})], "field `http_address`"),
        ([msgspec.msgpack.encode({"type": "P", "http_address": "a" * 513})], "length <= 512"),
        ([msgspec.msgpack.encode({"type": "X", "http_address": "a:1"})], "no role is called 'X'"),
    ],
)
def test_what_is_no_heartbeat_is_told_and_counted(
    rig: Rig, frames: list[bytes], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.beats.hear("127.0.0.1", frames)
    (line,) = [record.message for record in caplog.records]
    assert told in line
    assert "\n" not in line
    rig.passes(1)
    assert rig.published == []


def test_only_senders_on_this_machine_and_in_the_named_networks_are_heard(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = ["::ffff:10.1.0.9", "fd00::9", "127.0.0.1"], ["10.2.0.9", "fd01::9", "fe80::9%2"]
    for port, sender in enumerate(good + bad, 1):
        rig.hear("D", f"a:{port}", sender=sender)
    rig.passes(0.25)
    assert [entry.url[-1] for entry in rig.published[0]] == ["1", "2", "3"]
    assert f"from {bad[0]}, which is in no network of --heartbeats-from: add it" in caplog.text


def test_the_number_of_servers_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_SERVERS", 1)
    rig.hear("D", "b:3")
    rig.hear("D", "c:1")
    rig.passes(0.25)
    assert rig.published == [(DECODE,)]
    rig.passes(6)
    rig.hear("D", "c:1")
    rig.passes(0.25)
    assert rig.published[-1] == (StockEntry("decode", "http://c:1"),)


# --------------------------------------------------------------------------- what they get


def test_an_odd_prompt_has_no_blocks_but_a_length() -> None:
    for body in (
        {},
        {"prompt": 3},
        {"prompt": "\ud800"},
        {"messages": ["\ud800"]},
        {"prompt": float("inf")},
        {"prompt": [-1]},
        {"prompt": []},
        {"messages": {}},
    ):
        found = prompt_of(body)
        assert (found.tokens >= 1, len(found.hashes)) == (True, 0)
