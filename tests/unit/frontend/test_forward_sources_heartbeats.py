"""Heartbeats of stock servers: who is known, for how long, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pullfill.errors import ConfigError, OverloadedError
from pullfill.frontend import counters as metrics
from pullfill.frontend.forward import sources
from pullfill.frontend.forward.sources import JSON, MSGPACK, Heartbeats, StockEntry

PREFILL = StockEntry("prefill", "http://a:1", "k:2")
DECODE = StockEntry("decode", "http://b:3")


class Rig:
    """Heartbeats with a clock of the test's. published: each list of servers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.published: list[tuple[StockEntry, ...]] = []
        self.beats = Heartbeats(self.published.append, 5.0, lambda: self.now)

    def hear(self, kind: str, http: str, zmq: str = "") -> StockEntry:
        beat = {"type": kind, "http_address": http, "zmq_address": zmq}
        return self.beats.hear(json.dumps(beat).encode(), JSON)

    def passes(self, seconds: float) -> None:
        """Look four times a second, as the task does."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.beats.look()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def count(result: str) -> float:
    found: float = metrics.HEARTBEATS.labels(result)._value.get()
    return found


def test_what_connectors_send() -> None:
    rig = Rig()
    sent: dict[str, Any] = {
        "type": "P", "http_address": "10.0.0.1:8100", "dp_size": 1, "tp_size": 2,
        "zmq_address": "host:10.0.0.1,handshake:6301,notify:61005", "transfer_mode": "WRITE",
    }  # fmt: skip
    entry = rig.beats.hear(msgspec.msgpack.encode(sent), MSGPACK)
    assert entry == StockEntry("prefill", "http://10.0.0.1:8100", sent["zmq_address"])
    assert rig.beats.hear(json.dumps(sent).encode(), JSON) == entry


def test_a_server_is_known_until_it_is_silent_for_too_long(rig: Rig) -> None:
    rig.hear("P", "a:1", "k:2")
    rig.hear("D", "b:3")
    rig.passes(3)
    assert rig.published == [(PREFILL, DECODE)]
    rig.hear("D", "b:3")
    rig.passes(2)
    assert len(rig.published) == 1, "5 s are not over"
    rig.passes(0.5)
    assert rig.published[1:] == [(DECODE,)]
    rig.passes(3)
    assert rig.published[2:] == [()]
    rig.hear("D", "b:3")
    rig.passes(0.25)
    assert rig.published[3:] == [(DECODE,)]


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
    before = count("refused")
    rig.hear("P", "a:1", "k:2")
    for _ in range(3):
        with pytest.raises(ConfigError, match="two prefill servers say that they are http://a:1"):
            rig.hear("P", "a:1", "other:2")
        rig.passes(1)
        rig.hear("P", "a:1", "k:2")
    assert rig.published == [(PREFILL,)]
    assert count("refused") == before + 3
    assert len(caplog.records) == 1, "it is said once"
    rig.passes(6)
    rig.hear("P", "a:1", "other:2")
    rig.passes(0.25)
    assert rig.published[-1] == (StockEntry("prefill", "http://a:1", "other:2"),)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cannot read a heartbeat"),
        (b"\x80\x04K\x01.", "cannot read a heartbeat"),
        (b"[" * 4000, "cannot read a heartbeat"),
        (b'{"type": "P"}', "field `http_address`"),
        (b'{"type": 1, "http_address": "a:1"}', "Expected `str`, got `int`"),
        (b'{"type": "P", "http_address": "%s"}' % (b"a" * 513), "length <= 512"),
        (b'{"type": "P", "http_address": "a:1"}' + b" " * 4096, "more than 4096 bytes"),
        (b'{"type": "X", "http_address": "a:1"}', "no role is called 'x'"),
        (b'{"type": "P", "http_address": "a:1/?x"}', "no address of a server"),
        (b'{"type": "P", "http_address": "a:1", "zmq_address": "k k"}', "no KV address"),
    ],
)
def test_what_is_no_heartbeat_is_told_and_counted(rig: Rig, data: bytes, told: str) -> None:
    before = count("unreadable") + count("refused")
    with pytest.raises(ConfigError) as caught:
        rig.beats.hear(data, JSON)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    rig.passes(1)
    assert rig.published == []
    assert count("unreadable") + count("refused") == before + 1
    with pytest.raises(ConfigError):
        rig.beats.hear(data, MSGPACK)


def test_the_number_of_servers_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_SERVERS", 2)
    rig.hear("D", "b:3")
    rig.hear("P", "a:1", "k:2")
    with pytest.raises(OverloadedError, match="2 servers send heartbeats"):
        rig.hear("D", "c:1")
    rig.hear("D", "b:3")
    rig.passes(6)
    rig.hear("D", "c:1")
    rig.passes(0.25)
    assert rig.published[-1] == (StockEntry("decode", "http://c:1"),)
