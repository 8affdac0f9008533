"""NATS and etcd as `pullfill up` sees them: their commands, URLs, and whether one answers."""

from __future__ import annotations

import socket
import subprocess
import threading
from pathlib import Path

import pytest

from pullfill.deploy import local_servers
from pullfill.deploy.members import http_get
from pullfill.errors import UnavailableError
from tests.support.waiting import eventually

_HEALTHY = b'HTTP/1.0 200 OK\r\n\r\n{"health":"true"}'


class TestServers:
    def test_nats_starts_below_a_path_of_any_letters(self, tmp_path: Path) -> None:
        port = local_servers.free_port()
        with subprocess.Popen(
            local_servers.nats_command(tmp_path / 'josé "模型"', port), stderr=subprocess.DEVNULL
        ) as nats:
            url = f"nats://127.0.0.1:{port}"
            try:
                eventually(
                    lambda: local_servers.nats_ready(url) is None or nats.poll(), "it starts"
                )
                assert nats.poll() is None
            finally:
                nats.kill()

    def test_what_does_not_speak_http_is_told_in_words(self) -> None:
        """As of `--etcd` with the port of NATS."""
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def greet() -> None:
                for _ in range(2):
                    conn, _ = listener.accept()
                    with conn:
                        conn.sendall(b"INFO {}\r\n")
                        conn.recv(65536)

            thread = threading.Thread(target=greet, daemon=True)
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert local_servers.etcd_ready(url) == f"no etcd at {url}: INFO {{}}"
            with pytest.raises(UnavailableError) as caught:
                http_get(url)
            assert str(caught.value) == f"{url}: INFO {{}}"
            thread.join()

    def test_what_is_said_of_a_server_keeps_its_login(self) -> None:
        nobody = f"127.0.0.1:{local_servers.free_port()}"
        told = [
            local_servers.nats_ready(f"nats://ann:secret@{nobody}"),
            local_servers.nats_ready(f"secret@{nobody}"),
            local_servers.etcd_ready(f"http://ann:secret@{nobody}"),
        ]
        for text in told:
            assert text is not None
            assert nobody in text
            assert "secret" not in text

    def test_one_member_of_several_is_enough(self) -> None:
        closed, other = local_servers.free_port(), local_servers.free_port()
        why = local_servers.nats_ready(f"nats://127.0.0.1:{closed}, nats://127.0.0.1:{other}")
        assert why is not None
        assert why.startswith(f"no NATS server at nats://127.0.0.1:{closed}:")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            here = f"127.0.0.1:{listener.getsockname()[1]}"

            def answer() -> None:
                for text in (b'INFO {"jetstream":true}\r\n', _HEALTHY):
                    conn, _ = listener.accept()
                    with conn:
                        if text is _HEALTHY:
                            conn.recv(65536)
                        conn.sendall(text)

            thread = threading.Thread(target=answer)
            thread.start()
            assert local_servers.nats_ready(f"nats://127.0.0.1:{closed},nats://{here}", 5.0) is None
            assert local_servers.etcd_ready(f"http://127.0.0.1:{closed},http://{here}", 5.0) is None
            thread.join()
