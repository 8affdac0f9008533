"""URLs of etcd."""

from __future__ import annotations

import pytest

from pullfill.errors import ConfigError
from pullfill.registry.gateway import parse_url


def test_urls() -> None:
    assert parse_url("127.0.0.1:99")[0] == [("http", "127.0.0.1", 99)]
    endpoints, credentials = parse_url("https://me:p%40ss@a:1,https://b")
    assert endpoints == [("https", "a", 1), ("https", "b", 2379)]
    assert credentials == ("me", "p@ss")
    for bad in ("", "ftp://x", "http://x/path", "http://:2379", "http://x:port"):
        with pytest.raises(ConfigError):
            parse_url(bad)
    with pytest.raises(ConfigError, match="cannot read etcd URL 'http://x/path'"):
        parse_url("http://me:secret@x/path")
