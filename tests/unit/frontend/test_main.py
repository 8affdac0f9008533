"""The addresses that the frontend listens on.

Its end: tests/integration/test_frontend_processes.py."""

from __future__ import annotations

import socket

import pytest

from pullfill.errors import ConfigError
from pullfill.frontend.main import bind, listeners_of
from pullfill.options import FrontendOptions


def test_a_taken_port_is_one_clear_line() -> None:
    """Also to a frontend that starts together with another one, which does not listen yet."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)


def test_frontends_that_share_a_port_get_connections_only_once_they_listen() -> None:
    with bind("127.0.0.1", 0) as own:
        with pytest.raises(ConfigError):
            bind("127.0.0.1", own.getsockname()[1], shared=True)
    with bind("127.0.0.1", 0, shared=True) as one:
        port = one.getsockname()[1]
        with bind("127.0.0.1", port, shared=True) as two:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            two.listen()
            two.settimeout(5.0)
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port)), two.accept()[0]:
                    pass


def test_a_port_to_share_has_a_number() -> None:
    with pytest.raises(ConfigError, match="--own-port"):
        listeners_of(FrontendOptions(port=0, own_port=0))
