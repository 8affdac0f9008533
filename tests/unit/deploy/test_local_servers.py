"""NATS and etcd as `pullfill up` sees them: their commands, URLs, and whether one answers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pullfill.deploy import local_servers
from tests.support.waiting import eventually


def test_nats_starts_below_a_path_of_any_letters(tmp_path: Path) -> None:
    port = local_servers.free_port()
    command = local_servers.nats_command(tmp_path / 'josé "模型"', port)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nats:
        url = f"nats://127.0.0.1:{port}"
        eventually(lambda: local_servers.nats_ready(url) is None or nats.poll(), "it starts")
        assert nats.poll() is None
        assert local_servers.nats_ready(f"nats://127.0.0.1:1,{url}") is None, "one is enough"
        # As of `--etcd` with the port of NATS.
        told = local_servers.etcd_ready(url.replace("nats", "http"))
        assert told is not None
        assert told.startswith(f"etcd at http://127.0.0.1:{port} did not answer within")
        assert "\n" not in told
        nats.kill()


def test_what_is_said_of_a_server_keeps_its_login_and_is_of_the_first() -> None:
    nobody = f"127.0.0.1:{local_servers.free_port()}"
    for told in (
        local_servers.nats_ready(f"nats://ann:secret@{nobody}, nats://127.0.0.1:1"),
        local_servers.nats_ready(f"secret@{nobody}"),
        local_servers.etcd_ready(f"http://ann:secret@{nobody}"),
    ):
        assert told is not None
        assert nobody in told
        assert "secret" not in told
