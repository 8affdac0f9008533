"""Frontends over real sockets: lost workers, requests that are refused, clients. No vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn

from pullfill.config import ClusterRef
from pullfill.deploy import operate
from pullfill.errors import ConfigError
from pullfill.frontend.admission import Admission
from pullfill.frontend.main import Server
from pullfill.registry.client import EtcdClient
from pullfill.registry.suspect_records import SuspectBoard, posted
from pullfill.wire import WorkerRecord
from tests.support.etcd import EtcdServer
from tests.support.fake_vllm import answer, request
from tests.support.frontend_rig import FakeDecode, Rig, rig
from tests.support.waiting import soon

WORKER = """
import time
from tests.support.frontend_rig import FakeDecode
fake = FakeDecode("decode-1", step_s=0.02).start()
print(fake.record.data, flush=True)
time.sleep(600)
"""
BOUND_S, TICK_S = 5.0, 0.02
PROMPT = [1, 2, 3]
TOKENS = 400


@asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, WorkerRecord]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER,
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    template = FakeDecode("decode-1")
    try:
        address = (await process.stdout.readline()).decode().strip()
        yield process, msgspec.structs.replace(template.record, data=address)
    finally:
        template.die()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def stopwatch() -> AsyncIterator[Callable[[], float]]:
    """Measures seconds in which this event loop could run. A busy machine may stop it for
    others."""
    passed_s = 0.0

    async def tick() -> None:
        nonlocal passed_s
        while True:
            await asyncio.sleep(TICK_S)
            passed_s += TICK_S

    task = asyncio.create_task(tick())
    try:
        yield lambda: passed_s
    finally:
        task.cancel()


async def begun(r: Rig, record: WorkerRecord, request_id: str) -> None:
    """A frontend with a request whose tokens come from the process."""
    r.directory.put(record)
    await r.ready(1)
    r.dispatcher.submit(request(request_id, PROMPT, max_tokens=TOKENS))
    await soon(lambda: len(r.sink.tokens.get(request_id, [])) > 3)


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.essential
async def test_a_lost_process_is_noticed_within_five_seconds(fault: int) -> None:
    """Two frontends: one knows another worker and goes on there, one does not and says so."""
    other = FakeDecode("decode-2")
    async with worker_process() as (process, record), rig() as lucky, rig() as alone:
        await asyncio.gather(begun(lucky, record, "a"), begun(alone, record, "b"))
        lucky.add(other)
        await lucky.ready(2)
        process.send_signal(fault)
        async with stopwatch() as passed_s:
            await soon(lambda: bool(other.added))
            assert passed_s() < BOUND_S
            await soon(lambda: "b" in alone.sink.failures)
            assert passed_s() < BOUND_S
        assert "decode-1 was lost" in alone.sink.failures["b"]
        await soon(lambda: "a" in lucky.sink.finished)
        assert lucky.sink.tokens["a"] == answer(PROMPT, TOKENS)
        assert [q.request_id for q in other.added] == ["a~1"]


# ------------------------------------------------------------------ all refuse what one has refused


FATAL = 666
"""A token that ends every worker it reaches."""


@asynccontextmanager
async def frontend(
    etcd: EtcdServer, ns: str, *fakes: FakeDecode
) -> AsyncIterator[tuple[Rig, SuspectBoard]]:
    client = await EtcdClient.connect(etcd.url, wait_s=10, timeout_s=0.5)
    board = SuspectBoard(client, ns, lambda: 90.0)
    await board.start()
    try:
        async with rig(*fakes, board=board) as r:
            yield r, board
    finally:
        await board.close()
        await client.close()


def deadly(*names: str) -> list[FakeDecode]:
    return [FakeDecode(name, fatal_token=FATAL) for name in names]


async def kill_two(r: Rig, board: SuspectBoard) -> str:
    """The fingerprint of a request that two workers have died with."""
    r.dispatcher.submit(request("d", [FATAL]))
    await soon(lambda: "d" in r.sink.failures)
    assert r.sink.refused == {"d"}
    (row,) = board.listed()
    return str(row["fingerprint"])


@pytest.mark.essential
async def test_what_one_frontend_refuses_the_other_refuses_until_it_is_cleared(
    etcd: EtcdServer, ns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = FakeDecode("decode-9")
    ref = ClusterRef(ns, etcd.url, "nats://127.0.0.1:1")
    async with (
        frontend(etcd, ns, *deadly("decode-1", "decode-2")) as (one, board_1),
        frontend(etcd, ns, other) as (two, board_2),
    ):
        name = await kill_two(one, board_1)
        await soon(lambda: board_2.left_s(name) > 0)
        two.dispatcher.submit(request("x", [FATAL]))
        assert two.sink.refused == {"x"}
        assert f"pullfill suspects clear {name}" in two.sink.failures["x"]
        assert not other.added
        (row,) = board_2.listed()
        assert (row["fingerprint"], row["deaths"], row["prompt_tokens"]) == (name, 2, 1)
        assert float(str(row["left_s"])) > 80
        await operate.suspects(ref, as_json=True)
        (told,) = json.loads(capsys.readouterr().out)
        assert told["fingerprint"] == name
        assert 80 < told["left_s"] <= 90
        with pytest.raises(ConfigError, match=name):
            await operate.suspects(ref, "clear", "cafe")
        await soon(lambda: len(board_1) == len(board_2) == 1)
        await operate.suspects(ref, "clear", name)
        await soon(lambda: not len(board_1) and not len(board_2))
        one.dispatcher.submit(request("z", [1]))
        assert not one.dispatcher.flights["z"].deaths, (
            "the frontend that refused it has forgotten it"
        )
        two.dispatcher.submit(request("y", [FATAL]))
        await soon(lambda: "y" in two.sink.finished)
    await operate.suspects(ref, "clear", every=True)
    await operate.suspects(ref)
    assert "no request is refused" in capsys.readouterr().out


async def test_a_refusal_waits_for_etcd_and_serving_does_not(tmp_path: Path, ns: str) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        fakes = deadly("decode-1", "decode-2", "decode-3")
        async with frontend(etcd, ns, *fakes) as (r, board):
            await asyncio.to_thread(etcd.kill)
            await kill_two(r, board)
            r.dispatcher.submit(request("again", [FATAL]))
            assert "again" in r.sink.refused, "by this frontend's own list"
            r.dispatcher.submit(request("good", [1]))
            await soon(lambda: "good" in r.sink.finished)
            await asyncio.to_thread(etcd.start)
            client = await EtcdClient.connect(etcd.url, wait_s=10)
            await soon(lambda: posted(client, ns))
            await client.close()


async def test_entries_nobody_can_read_do_no_harm(etcd: EtcdServer, ns: str) -> None:
    async with frontend(etcd, ns, FakeDecode("decode-1")) as (r, board):
        etcd.ctl("put", f"/pullfill/{ns}/suspects/cafe", "rubbish")
        board.post("beef", 2, 9)
        await soon(lambda: board.left_s("beef") > 0)
        r.dispatcher.submit(request("good"))
        await soon(lambda: "good" in r.sink.finished)
        client = await EtcdClient.connect(etcd.url)
        rows = await soon(lambda: posted(client, ns))
        assert [row["fingerprint"] for row in rows] == ["beef"]
        await client.close()


async def test_a_refusal_of_the_shortest_time_reaches_the_others(etcd: EtcdServer, ns: str) -> None:
    client = await EtcdClient.connect(etcd.url)
    one, two = (SuspectBoard(client, ns, lambda: 1.0) for _ in range(2))
    await two.start()
    one.post("beef", 2, 9)
    await soon(lambda: two.left_s("beef") > 0)
    for board in (one, two):
        await board.close()
    await client.close()


# --------------------------------------------- clients that stop reading, and clients that go away


REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Streams until its client is gone."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(receive())
    try:
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
    finally:
        gone.cancel()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Admission, int]]:
    gate = Admission(endless, str, 8, send_s=0.4)
    config = uvicorn.Config(gate, port=0, log_level="critical", lifespan="off")
    server = Server(config)
    running = asyncio.create_task(server.serve())
    await soon(lambda: server.started)
    yield gate, server.servers[0].sockets[0].getsockname()[1]
    server.force_exit = server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.essential
async def test_a_client_that_reads_nothing_is_left_and_one_that_goes_too(
    served: tuple[Admission, int],
) -> None:
    gate, port = served
    deaf_reader, deaf = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for client in (deaf, writer):
        client.write(REQUEST)
    await soon(lambda: gate.in_flight == 2)

    async def read() -> None:
        while await reader.read(1 << 20):
            pass

    reading = asyncio.create_task(read())
    await soon(lambda: gate.in_flight == 1)
    assert not reading.done(), "who reads is not left"
    writer.transport.abort()
    await soon(lambda: gate.in_flight == 0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    deaf.transport.abort()
    del deaf_reader
