"""The address that the frontend listens on."""

from __future__ import annotations

import socket

import pytest

from pullfill.errors import ConfigError
from pullfill.frontend.main import bind, url_of


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
