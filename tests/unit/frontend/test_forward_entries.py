"""How stock servers are named."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.errors import ConfigError
from pullfill.frontend.forward.entries import Entry, of_heartbeat, parse_file, parse_list


def test_a_list() -> None:
    text = "prefill=http://a:1@k:2, decode=b:3/,decode=http://b:3,"
    assert parse_list(text) == (
        Entry("prefill", "http://a:1", "k:2"), Entry("decode", "http://b:3"),
    )  # fmt: skip
    assert parse_list("") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://a:1", "give ROLE=URL"),
        ("frontend=http://a:1", "no role is called 'frontend'"),
        ("decode=ftp://a:1", "give http://HOST:PORT"),
        ("decode=", "give http://HOST:PORT"),
        ("decode=http://a:99999", "give http://HOST:PORT"),
        ("decode=http://a:1/?x", "give http://HOST:PORT"),
        ("decode=http://a:1@k k", "give HOST:PORT"),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        parse_list(text)


def test_a_file() -> None:
    text = "# servers\n\nprefill http://a:1 k:2  # the first\n  decode http://b:3\n"
    assert parse_file(text, "f") == (
        Entry("prefill", "http://a:1", "k:2"), Entry("decode", "http://b:3"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"f, line 2: no role is called 'x'"):
        parse_file("decode http://b:3\nx http://c:4", "f")
    with pytest.raises(ConfigError, match="line 1: give ROLE URL"):
        parse_file("decode", "f")


@pytest.mark.parametrize(
    ("message", "entry"),
    [
        # vLLM 0.32, kv_connector/v1/moriio/moriio_connector.py
        (
            {
                "type": "P",
                "http_address": "10.0.0.1:8100",
                "zmq_address": "host:10.0.0.1,handshake:6301,notify:61005",
                "dp_size": 1,
                "tp_size": 1,
                "transfer_mode": "READ",
            },
            Entry("prefill", "http://10.0.0.1:8100", "host:10.0.0.1,handshake:6301,notify:61005"),
        ),
        (
            {"role": "decode", "url": "https://h:1/", "kv_address": "h:2"},
            Entry("decode", "https://h:1", "h:2"),
        ),
    ],
)
def test_a_heartbeat(message: dict[str, Any], entry: Entry) -> None:
    assert of_heartbeat(message) == entry


@pytest.mark.parametrize("message", [[], 1, {}, {"type": "P"}, {"type": 1, "http_address": "a"}])
def test_a_bad_heartbeat(message: object) -> None:
    with pytest.raises(ConfigError):
        of_heartbeat(message)
