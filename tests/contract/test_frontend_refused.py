"""All frontends refuse what one has refused: real etcd, real ZMQ, fake workers that can die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import operate
from pullfill.errors import ConfigError
from pullfill.registry.client import EtcdClient
from pullfill.registry.suspect_records import SuspectBoard, posted
from tests.support.etcd import EtcdServer
from tests.support.fake_vllm import request
from tests.support.frontend_rig import FakeDecode, Rig, rig
from tests.support.waiting import soon

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
        assert [row["fingerprint"] for row in await posted(client, ns)] == ["beef"]
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
