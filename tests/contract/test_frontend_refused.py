"""All frontends refuse what one has refused: real etcd, real ZMQ, fake workers that can die."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path

import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import suspects as command
from pullfill.errors import ConfigError
from pullfill.registry import probations
from pullfill.registry.client import EtcdClient
from pullfill.registry.suspect_records import posted
from tests.support.etcd import EtcdServer
from tests.support.fake_decode import FakeDecode
from tests.support.fake_vllm import request
from tests.support.frontend_pair import FATAL, frontend
from tests.support.frontend_rig import PATIENCE_S, Rig, until


def deadly(*names: str) -> list[FakeDecode]:
    return [FakeDecode(name, fatal_token=FATAL) for name in names]


async def kill_two(r: Rig, name: str = "d") -> str:
    """The fingerprint of a request that two workers have died with."""
    r.dispatcher.submit(request(name, [FATAL]))
    await until(lambda: name in r.sink.failures)
    assert r.sink.refused == {name}
    (row,) = r.dispatcher.suspects.listed()
    return str(row["fingerprint"])


@pytest.mark.essential
async def test_what_one_frontend_refuses_the_other_refuses_until_it_is_cleared(
    etcd: EtcdServer, ns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = FakeDecode("decode-9")
    ref = ClusterRef(ns, etcd.url, "nats://127.0.0.1:1")
    async with (
        frontend(etcd, ns, "frontend-1", *deadly("decode-1", "decode-2")) as (one, board_1),
        frontend(etcd, ns, "frontend-2", other) as (two, board_2),
    ):
        name = await kill_two(one)
        await until(lambda: board_2.left_s(name) > 0)
        two.dispatcher.submit(request("x", [FATAL]))
        assert two.sink.refused == {"x"}
        assert f"pullfill suspects clear {name}" in two.sink.failures["x"]
        assert not other.added
        (row,) = board_2.listed()
        assert (row["fingerprint"], row["deaths"], row["prompt_tokens"]) == (name, 2, 1)
        await asyncio.to_thread(command.show, ref, True)
        (told,) = json.loads(capsys.readouterr().out)
        assert told["fingerprint"] == name
        with pytest.raises(ConfigError, match=name):
            await asyncio.to_thread(command.clear, ref, "cafe")
        await until(lambda: len(board_1) == len(board_2) == 1)
        await asyncio.to_thread(command.clear, ref, name)
        await until(lambda: not len(board_1) and not len(board_2))
        assert not one.dispatcher.suspects.listed(), "the frontend that refused it has forgotten it"
        two.dispatcher.submit(request("y", [FATAL]))
        await until(lambda: "y" in two.sink.finished)
    await asyncio.to_thread(command.clear, ref, None)
    await asyncio.to_thread(command.show, ref, False)
    assert "no request is refused" in capsys.readouterr().out


async def test_a_refusal_waits_for_etcd_and_serving_does_not(tmp_path: Path, ns: str) -> None:
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd:
        fakes = deadly("decode-1", "decode-2", "decode-3")
        async with frontend(etcd, ns, "frontend-1", *fakes) as (r, board):
            await asyncio.to_thread(etcd.kill)
            name = await kill_two(r)
            r.dispatcher.submit(request("again", [FATAL]))
            assert "again" in r.sink.refused, "by this frontend's own list"
            r.dispatcher.submit(request("good", [1]))
            await until(lambda: "good" in r.sink.finished)
            assert not len(board)
            await asyncio.to_thread(etcd.start)
            await until(lambda: board.left_s(name) > 0)


async def test_two_frontends_that_suspect_one_request_each_lose_no_answer(
    etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests are at the first two workers that die, but only one is deadly. Each frontend
    believes that it is the only one, so it does not announce its probation. But it learns of the
    other's suspect before it refuses its own."""
    monkeypatch.setattr(probations, "SETTLE_S", 2.0)  # a busy machine writes late
    fakes = [FakeDecode(f"decode-{i}", hold=i < 2, fatal_token=FATAL).start() for i in range(6)]
    async with (
        frontend(etcd, ns, "frontend-1") as (one, _),
        frontend(etcd, ns, "frontend-2") as (two, _),
    ):
        for fake in fakes[:2]:
            two.add(fake)
            await two.ready(1)
            if fake is fakes[0]:
                two.dispatcher.submit(request("good", [1]))
            await until(lambda fake=fake: bool(fake.added))  # type: ignore[misc]
            one.add(fake)
            if fake is fakes[0]:
                one.dispatcher.submit(request("d", [FATAL]))
            await until(lambda fake=fake: bool(fake.killed_by))  # type: ignore[misc]
            await until(lambda: not one.pool.candidates() and not two.pool.candidates())
            for r in (one, two):
                r.directory.remove(fake.instance_id)
        for fake in fakes[2:]:
            two.add(fake)
        # Unannounced probations at one worker at the same time would cost one more worker.
        await until(lambda: "good" in two.sink.finished)
        for fake in fakes[2:]:
            one.add(fake)
        async with asyncio.timeout(PATIENCE_S):
            while "d" not in one.sink.failures:
                await asyncio.sleep(0.02)
                for r, fake in product((one, two), fakes):
                    if fake.killed_by and fake.instance_id in r.directory.records:
                        r.directory.remove(fake.instance_id)
        assert one.sink.refused == {"d"}
        assert sum(bool(fake.killed_by) for fake in fakes) == 3, "the second death blamed nobody"
    for fake in fakes:
        fake.die()


async def test_entries_nobody_can_read_do_no_harm(etcd: EtcdServer, ns: str) -> None:
    async with frontend(etcd, ns, "frontend-1", FakeDecode("decode-1")) as (r, board):
        etcd.ctl("put", f"/pullfill/{ns}/suspects/cafe", "rubbish")
        for key in ("deaths/decode-1/frontend-2", "at/decode-1", "clear/x", "what", "of/a/b"):
            etcd.ctl("put", f"/pullfill/{ns}/probations/{key}", "rubbish")
        board.post("beef", 2, 9, 600.0)
        await until(lambda: board.left_s("beef") > 0)
        assert await board.probations.testimony("decode-1", "x") == probations.Told()
        r.dispatcher.submit(request("good"))
        await until(lambda: "good" in r.sink.finished)
        client = await EtcdClient.connect(etcd.url)
        assert [record.fingerprint for record in await posted(client, ns)] == ["beef"]
        await client.close()
