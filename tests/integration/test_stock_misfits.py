"""Real servers that do not fit: each request ends, and the error says which one and what to do."""

from __future__ import annotations

import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pullfill.frontend.forward import sources
from pullfill.frontend.forward.protocols import KvProtocol, Nixl, Stages, protocol_of
from tests.support.etcd import free_ports
from tests.support.forward_rig import ForwardRig, forwarding_to
from tests.support.oracle import Oracle
from tests.support.stock_peers import END_S, Got, Peers, body, prompt, right
from tests.support.stock_vllm import StockVllm, stock_vllm

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
    ),
]


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    directory, roles = tmp_path_factory.mktemp("pair"), ("prefill", "decode")
    with stock_vllm(directory, model_path, roles, hosts=True) as found:
        for server in found:
            server.ready()
        yield Peers(found, {})


@pytest.fixture
def bare(model_path: Path, tmp_path: Path) -> Iterator[StockVllm]:
    """A server without a connector, which has served nothing yet."""
    with stock_vllm(tmp_path, model_path, ("decode",), connector=False) as (server,):
        server.ready()
        yield server


@asynccontextmanager
async def over(
    prefill: StockVllm, decode: StockVllm, protocol: KvProtocol | None = None, **how: Any
) -> AsyncIterator[ForwardRig]:
    """A forwarder over two servers. how: `name` and `dispatch` of it, and `kv`, their KV address.

    Without `kv`, nobody answers there."""
    kv = how.pop("kv", f"127.0.0.1:{free_ports(1)[0]}")
    found = [sources.make("prefill", prefill.url, kv), sources.make("decode", decode.url, kv)]
    how = {"name": "staged", "silence_s": END_S, **how}  # a busy machine is silent for seconds
    model = str(prefill.model)
    async with forwarding_to(found, spoken=protocol or Nixl(), model=model, **how) as rig:
        rig.patience_s = END_S
        yield rig


async def ask(rig: ForwardRig, number: int, **fields: Any) -> Got:
    """Send a request, and read the answer as other clients of stock servers do."""
    answer = await rig.ask(body(prompt(number)) | fields)
    return Got(status=answer.status, body=answer.body)


async def test_a_decode_server_without_the_connector(
    pair: Peers, bare: StockVllm, oracle: Oracle
) -> None:
    (prefill,) = pair.of("prefill")
    async with over(prefill, bare) as rig:
        await rig.states(ready=2)
        first = await ask(rig, 3)
        await rig.states(refused=1)
        second = await ask(rig, 4)
    assert first.tokens == right(oracle, [prompt(3)])[0], "it has computed the prompt itself"
    assert second.status == 503
    assert f"{bare.url} is refused: it has no KV connector" in second.error
    assert "start it with --kv-transfer-config" in second.error
    await pair.freed()


class DeadKv(Nixl):
    """Sends decode servers to a KV address where nobody answers."""

    def decode(self, stages: Stages) -> dict[str, Any]:
        dead = {"remote_port": free_ports(1)[0], "remote_engine_id": uuid.uuid4().hex}
        return {**super().decode(stages), **dead}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kv_address_that_nobody_answers_at(stream: bool, pair: Peers) -> None:
    (prefill,), (decode,) = pair.of("prefill"), pair.of("decode")
    async with over(prefill, decode, DeadKv()) as rig:
        await rig.states(ready=2)
        got = await ask(rig, 5 + stream, stream=stream)
    assert got.status == 500
    assert f"decode server {decode.url} answers 500" in got.error
    assert f"could not read the KV of {prefill.url} at 127.0.0.1:" in got.error
    await pair.freed()


class Freezing(Nixl):
    """Freezes the prefill server before the decode server can read its KV."""

    def __init__(self, prefill: StockVllm) -> None:
        self._server = prefill

    def decode(self, stages: Stages) -> dict[str, Any]:
        self._server.send(signal.SIGSTOP)
        return super().decode(stages)


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_of_a_server_that_hangs(stream: bool, pair: Peers, oracle: Oracle) -> None:
    """vLLM's decode server would wait without end."""
    (prefill,), (decode,) = pair.of("prefill"), pair.of("decode")
    async with over(prefill, decode) as rig:
        await rig.states(ready=2)
        assert (await ask(rig, 20 + stream)).status == 200, "the servers know each other"
    async with over(prefill, decode, Freezing(prefill), silence_s=2 * END_S) as rig:
        await rig.states(ready=2)
        try:
            got = await ask(rig, 22 + stream, stream=stream)
        finally:
            prefill.send(signal.SIGCONT)
        assert not got.error
        record = rig.requests.get(got.events[0]["id"])
    assert got.tokens == right(oracle, [prompt(22 + stream)])[0]
    assert record is not None
    results = [stage.result for stage in record.stages if stage.stage == "decode"]
    assert len(results) > 1, record
    assert f"decode server {decode.url} waits for KV, and prefill server" in results[0]
    assert results[1:] == ["ok"]
    await pair.freed()


async def test_parameters_that_end_the_decode_server(pair: Peers) -> None:
    """`--protocol` is wrong, and nobody can see it before: vLLM 0.32 ends at these parameters."""
    (prefill,), (decode,) = pair.of("prefill"), pair.of("decode")
    how = {"name": "batch", "dispatch": "parallel", "kv": f"127.0.0.1:{prefill.ports[0]}"}
    async with over(prefill, decode, protocol_of("p2p"), **how) as rig:
        await rig.states(ready=2)
        got = await ask(rig, 11)
    assert got.status == 500
    assert f"decode server {decode.url} answers 500: EngineCore" in got.error
    assert "If it has another connector, start it with --kv-transfer-config" in got.error
