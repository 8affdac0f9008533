"""The lower bound of a remote prefill's CPU time: only its messages are sent, nothing else is done.

Two Python processes use the NATS server that the benchmark's cluster uses. For each job:

1. `decode` publishes a message of 1 KiB to a work-queue stream.
2. `prefill` pulls it.
3. They exchange claim, grant, commit and reply over TCP, in frames of 64 bytes.
4. `prefill` acknowledges the message.

nats-py and asyncio carry the messages. Nothing is encoded, checked, decided or copied. There is no
etcd, no frontend and no engine. So any control plane in Python that sends these messages with
these libraries costs at least this much.

This command runs one of the two processes:

    python -m benchmarks.control.floor prefill|decode NATS PORT PER_S JOBS WARM_UP
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks import machine
from benchmarks.report import Row, row

STREAM, SUBJECT = "floor", "floor.jobs"
BODY, FRAME = bytes(1024), bytes(64)
PER_S, JOBS, WARM_UP = 30.0, 300, 60
"""Jobs per second, jobs in all, and how many of them come before the measurement."""
ROLES = ("decode", "prefill")


class Peer(asyncio.Protocol):
    """One end of the TCP connection. Calls `heard` for each frame that arrives."""

    def __init__(self, heard: Callable[[Peer], None]) -> None:
        self._heard, self._bytes = heard, 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        while self._bytes >= len(FRAME):
            self._bytes -= len(FRAME)
            self._heard(self)

    def say(self) -> None:
        self.transport.write(FRAME)


async def decode(client: Client, port: int, per_s: float, jobs: int, warm_up: int) -> float:
    """Publish the jobs, and answer each frame of the other process with a frame.

    port: where to listen. 0: the operating system picks one. It is printed in any case.
    Returns the CPU seconds used after the warm-up."""
    loop = asyncio.get_running_loop()
    over, frames = asyncio.Event(), 0

    def heard(peer: Peer) -> None:
        nonlocal frames
        frames += 1
        peer.say()
        if frames == 2 * jobs:  # a claim and a commit of each job
            over.set()

    server = await loop.create_server(lambda: Peer(heard), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    inbox = client.new_inbox()

    async def stored(_: Msg) -> None:
        pass

    await client.subscribe(inbox, cb=stored)
    start, before = loop.time() + 1.0, 0.0
    for number in range(jobs):
        await asyncio.sleep(start + number / per_s - loop.time())
        if number == warm_up:
            before = time.process_time()
        await client.publish(SUBJECT, BODY, reply=inbox)
    await over.wait()
    used = time.process_time() - before
    server.close()
    return used


async def prefill(client: Client, port: int, per_s: float, jobs: int, warm_up: int) -> float:
    """Pull, claim, commit and acknowledge one job after the other.

    Returns the CPU seconds used after the warm-up."""
    loop = asyncio.get_running_loop()
    inbox, ask = client.new_inbox(), f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{STREAM}"
    over, frames, ack_subject, before = asyncio.Event(), 0, "", 0.0
    acknowledging: asyncio.Task[None]  # asyncio holds tasks weakly, so something must hold this one

    def answered(peer: Peer) -> None:
        nonlocal acknowledging, frames
        frames += 1
        if frames % 2:
            peer.say()  # that was the grant; this is the commit
        else:
            acknowledging = loop.create_task(acknowledge())

    async def acknowledge() -> None:
        nonlocal before
        if frames == 2 * warm_up:
            before = time.process_time()
        await client.publish(ack_subject, b"+ACK")
        if frames == 2 * jobs:
            over.set()
        else:
            await client.publish(ask, b'{"batch":1,"expires":60000000000}', reply=inbox)

    async def delivered(msg: Msg) -> None:
        nonlocal ack_subject
        ack_subject = msg.reply
        peer.say()  # the claim

    peer: Peer
    for _ in range(100):
        try:
            _, peer = await loop.create_connection(lambda: Peer(answered), "127.0.0.1", port)
            break
        except ConnectionError:
            await asyncio.sleep(0.05)
    await client.subscribe(inbox, cb=delivered)
    await client.publish(ask, b'{"batch":1,"expires":60000000000}', reply=inbox)
    await over.wait()
    await client.flush()
    return time.process_time() - before


async def _make_stream(url: str) -> None:
    async with await nats.connect(url) as client:
        stream = {"name": STREAM, "subjects": [SUBJECT], "retention": "workqueue"}
        config = {"durable_name": STREAM, "ack_policy": "explicit"}
        for operation, body in (
            (f"STREAM.CREATE.{STREAM}", stream),
            (f"CONSUMER.DURABLE.CREATE.{STREAM}.{STREAM}",
             {"stream_name": STREAM, "config": config}),
        ):  # fmt: skip
            answer = await client.request(f"$JS.API.{operation}", json.dumps(body).encode())
            assert b'"error"' not in answer.data, answer.data


def measure(
    url: str, pid: int, rounds: int = 1, jobs: int = JOBS, warm_up: int = WARM_UP
) -> dict[str, float]:
    """Run `rounds` rounds. Returns the median CPU ms for a job, by process.

    url, pid: of a NATS server with JetStream that does nothing else meanwhile.
    jobs, warm_up: as JOBS and WARM_UP."""
    asyncio.run(_make_stream(url))
    found: dict[str, list[float]] = {role: [] for role in (*ROLES, "nats")}
    for _ in range(rounds):
        ends: dict[str, subprocess.Popen[str]] = {}
        port = "0"
        for role in ("decode", "prefill"):
            order = [role, url, port, str(PER_S), str(jobs), str(warm_up)]
            command = [sys.executable, "-m", "benchmarks.control.floor", *order]
            ends[role] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            if role == "decode":
                told = ends[role].stdout
                assert told is not None
                port = told.readline().strip()
        time.sleep(2.0 + warm_up / PER_S)
        before, begin = machine.cpu_seconds(pid), time.monotonic()
        for role, end in ends.items():
            out, _ = end.communicate(timeout=120.0)
            found[role].append(float(out) / (jobs - warm_up))
        seconds = time.monotonic() - begin
        found["nats"].append((machine.cpu_seconds(pid) - before) / (seconds * PER_S))
    return {name: 1e3 * median(each) for name, each in found.items()}


def run(url: str, pid: int, rounds: int, jobs: int = JOBS, warm_up: int = WARM_UP) -> list[Row]:
    """Return the rows of `measure`."""
    found = measure(url, pid, rounds, jobs, warm_up)
    whole = row(f"floor: CPU of a job at {PER_S:g}/s, messages alone", sum(found.values()), "ms")
    rows = [
        row(f"floor: CPU of {name} for a job of messages alone", ms, "ms")
        for name, ms in found.items()
    ]
    rows.insert(0, whole)
    for one in rows:
        print(f"  {one.metric:<60} {one.value:>10} {one.unit}", flush=True)
    return rows


async def _one(role: str, url: str, port: int, per_s: float, jobs: int, warm_up: int) -> float:
    client = await nats.connect(url)
    work = decode if role == "decode" else prefill
    return await work(client, port, per_s, jobs, warm_up)


if __name__ == "__main__":
    role, url, port, per_s, jobs, warm_up = sys.argv[1:]
    print(asyncio.run(_one(role, url, int(port), float(per_s), int(jobs), int(warm_up))))
