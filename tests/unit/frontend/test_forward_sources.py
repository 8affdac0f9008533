"""How stock servers are named."""

from __future__ import annotations

import pytest

from pullfill import redact
from pullfill.errors import ConfigError
from pullfill.frontend.forward.sources import StockEntry, parse_list


def test_a_list() -> None:
    text = "prefill=http://a:1@k:2, decode=b:3/,decode=http://b:3,"
    assert parse_list(text) == (
        StockEntry("prefill", "http://a:1", "k:2"), StockEntry("decode", "http://b:3"),
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


def test_the_form_is_shown_as_it_is_meant() -> None:
    """Lines of commands go through `redact`, which takes away what stands before an @ in a URL."""
    with pytest.raises(ConfigError) as caught:
        parse_list("decode")
    assert redact.text(str(caught.value)) == str(caught.value)
    assert "prefill=10.0.0.1:8100@10.0.0.1:8998" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "decode=http://user:secret@a:1",
        "decode=user:secret@a:1",
        "decode=http://user:1secret@a:1",
        "http://user:secret@a:1",
        "user:secret@a:1=http://a:1",
        "decode=http://a:1?key=secret",
        "decode=http://a:1@user:secret@k k",
    ],
)
def test_passwords_are_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_list(text)
    assert "secret" not in str(caught.value)
