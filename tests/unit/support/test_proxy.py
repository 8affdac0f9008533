"""The fault proxy of the tests does what its modes say, on open connections too."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.proxy import Proxy


class Echo:
    """Answers every byte; remembers its connections."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets: list[socket.socket] = []
        self.ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.sockets.append(sock)
                threading.Thread(target=self._echo, args=(sock,), daemon=True).start()

    def _echo(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sock.recv(1024):
                sock.sendall(data)
        self.ended.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self.sockets:
            sock.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.listener.getsockname()) as running:
        yield running


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        sock.settimeout(5)
        assert says(sock, b"hello")
        yield sock


def says(sock: socket.socket, text: bytes) -> bool:
    sock.sendall(text)
    return hears(sock, text)


def hears(sock: socket.socket, text: bytes) -> bool:
    got = b""
    while len(got) < len(text):
        try:
            piece = sock.recv(len(text) - len(got))
        except TimeoutError:
            break
        if not piece:
            break
        got += piece
    return got == text


def test_delay_holds_each_piece_back(proxy: Proxy, client: socket.socket) -> None:
    proxy.delay(0.1)
    began = time.monotonic()
    assert says(client, b"late")
    assert time.monotonic() - began >= 0.2, "once each way"
    proxy.pass_all()
    assert says(client, b"again")


@pytest.mark.parametrize("ways", [(), ("up",), ("down",)])
def test_a_blackhole_is_silent_and_loses_nothing(
    ways: tuple[str, ...], proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.blackhole(*ways)  # type: ignore[arg-type]
    client.settimeout(0.1)
    assert not says(client, b"lost?")
    client.settimeout(5)
    proxy.pass_all()
    assert hears(client, b"lost?")
    assert not echo.ended.is_set()


def test_a_new_connection_falls_into_the_blackhole_too(proxy: Proxy) -> None:
    proxy.blackhole()
    with socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        sock.settimeout(0.1)
        assert not says(sock, b"anyone")
        sock.settimeout(5)
        proxy.pass_all()
        assert hears(sock, b"anyone")


def test_half_open_ends_the_client_only(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    proxy.half_open()
    assert client.recv(1) == b""
    assert not echo.ended.wait(0.2), "the target does not know"
    with socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        sock.settimeout(5)
        assert says(sock, b"next")


def test_reset_breaks_both_ends(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert echo.ended.wait(5)


def test_the_end_of_either_side_reaches_the_other(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    echo.sockets[0].shutdown(socket.SHUT_RDWR)
    assert client.recv(1) == b""
    with socket.create_connection(("127.0.0.1", proxy.port)) as other:
        other.settimeout(5)
        assert says(other, b"x")
        echo.ended.clear()
    assert echo.ended.wait(5)


def test_nobody_at_the_target_ends_the_connection(proxy: Proxy, echo: Echo) -> None:
    echo.close()
    with socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
