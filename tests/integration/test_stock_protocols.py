"""What we send to stock servers, read by the code of vLLM's own connectors, as far as it runs here.

NixlConnector runs whole: tests/integration/test_stock_peers.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pullfill.frontend.forward.protocols import Stages, protocol_of
from pullfill.frontend.forward.servers import Server
from pullfill.frontend.forward.sources import Heartbeats, bind_heartbeats, make
from tests.support.waiting import soon

moriio = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common",
    reason="this vLLM has no MoRIIOConnector",
)
PREFILL_KV = "host:10.0.0.1,handshake:6301,notify:61005"
DECODE_KV = "host:10.0.0.2,handshake:6302,notify:61006"


def stages() -> Stages:
    prefill = Server(*make("prefill", "10.0.0.1:8100", PREFILL_KV))
    return Stages(
        "0123456789abcdef" * 2, prefill, Server(*make("decode", "10.0.0.2:8200", DECODE_KV))
    )


@pytest.mark.parametrize("wrapped", ["cmpl-{}-0-1a2b3c4d", "chatcmpl-{}", "{}"])
def test_moriio_finds_both_servers_in_the_request_id(wrapped: str) -> None:
    name = wrapped.format(protocol_of("p2p").request_id(stages(), "r1"))
    prefill = moriio.get_peer_zmq_from_request_id(name, is_producer=False)
    decode = moriio.get_peer_zmq_from_request_id(name, is_producer=True)
    assert moriio.parse_moriio_zmq_address(prefill) == ("10.0.0.1", 6301, 61005)
    assert moriio.parse_moriio_zmq_address(decode) == ("10.0.0.2", 6302, 61006)


@pytest.mark.parametrize("mode", ["write", "read"])
def test_moriio_takes_the_parameters(mode: str) -> None:
    """A missing one would be a KeyError in the engine core, which ends it."""
    protocol, now = protocol_of("p2p"), stages()
    name = f"cmpl-{protocol.request_id(now, 'r1')}-0-1a2b3c4d"
    meta = moriio.MoRIIOConnectorMetadata()
    if mode == "write":  # the prefill server pushes, once the decode server has told its blocks
        meta.add_new_req(name, [[1, 2]], protocol.prefill(now), write_mode=True)
        (found,) = meta.reqs_to_save.values()
        assert (found.remote_host, found.remote_notify_port) == ("10.0.0.2", 61006)
    else:  # the decode server reads what the prefill server's answer names
        now.returned = {"remote_block_ids": [[7, 8]], "remote_engine_id": "e", "tp_size": 2}
        meta.add_new_req(name, [[1, 2]], protocol.decode(now))
        (found,) = meta.reqs_to_recv.values()
        assert (found.remote_host, found.remote_block_ids) == ("10.0.0.1", [[7, 8]])
    assert found.transfer_id == f"tx-{now.key}"


def test_mooncake_takes_the_parameters() -> None:
    mooncake = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
    )
    protocol = protocol_of("mooncake")
    prefill = Server(*make("prefill", "10.0.0.1:8100", "10.0.0.1:8998"), engine_id="engine-7")
    now = Stages("ab" * 16, prefill)
    meta = mooncake.MooncakeConnectorMetadata()
    meta.add_new_req("p", [[1]], protocol.prefill(now), load_remote_cache=False)
    meta.add_new_req("d", [[2]], protocol.decode(now))
    pulled = meta.reqs_to_recv["engine-7"]["d"]
    assert pulled.remote_bootstrap_addr == "http://10.0.0.1:8998"
    assert pulled.transfer_id == meta.reqs_to_send["p"][0]


async def test_the_heartbeats_of_moriio_are_heard(tmp_path: Path) -> None:
    """vLLM's own sender, a process of its own."""
    sender = Path(moriio.__file__).parent / "moriio_heartbeat.py"
    if not sender.exists():
        pytest.skip("before 0.32, vLLM sends them from a thread of its connector")
    # Its package for CPUs lacks msgpack.
    (tmp_path / "msgpack.py").write_text("from msgspec.msgpack import encode as dumps\n")
    known: list[Any] = []
    socket = bind_heartbeats("tcp://127.0.0.1:*", ())
    heard = Heartbeats(socket, (), lambda entries: known.__setitem__(slice(None), entries), 1.0)
    task = asyncio.create_task(heard.run())
    payload = {"type": "P", "http_address": "10.0.0.1:8100", "zmq_address": PREFILL_KV}
    payload |= {"dp_size": 1, "tp_size": 1, "transfer_mode": "WRITE"}
    command = [sys.executable, str(sender), heard.url, "0.2", "3"]
    with subprocess.Popen(  # noqa: ASYNC220 - it is short
        command, stdin=subprocess.PIPE, text=True, env={"PYTHONPATH": str(tmp_path)}
    ) as process:
        try:
            process.stdin.write(json.dumps(payload) + "\n")
            process.stdin.flush()
            await soon(lambda: known == [make("prefill", "10.0.0.1:8100", PREFILL_KV)])
            process.kill()
            await soon(lambda: not known)
        finally:
            process.kill()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            heard.socket.close()
