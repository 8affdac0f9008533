"""Kept results of self-checks against one real etcd."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pullfill.decode_worker.self_check import Checks, Ours
from pullfill.engine.groups import ONE_GROUP
from pullfill.errors import PeerUnavailable
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.self_checks import SelfChecks, clear, kept, pair_of
from pullfill.wire import Hello, SelfCheck, WorkerState, encode
from tests.support.control_rig import Decode
from tests.support.transfer_rigs import COMPAT
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory, record


def result(passed: bool) -> SelfCheck:
    return SelfCheck(
        passed=passed, kv_difference=0.0 if passed else 0.4, kv_tolerance=1e-3,
        logprob_difference=None, logprob_tolerance=1e-2,
        decode_instance="d", prefill_instance="p",
    )  # fmt: skip


async def test_a_failure_stays_until_it_is_cleared(client: EtcdClient) -> None:
    checks = await SelfChecks(client, "kept").start()
    other = await SelfChecks(client, "kept").start()
    heard = 0

    def on_change() -> None:
        nonlocal heard
        heard += 1

    other.subscribe(on_change)
    try:
        checks.keep("a", result(passed=True))
        await soon(lambda: other.current.get("a") == result(passed=True))
        other.keep("a", result(passed=False))
        await soon(lambda: checks.current.get("a") == result(passed=False))
        checks.keep("a", result(passed=True))
        checks.keep("b", result(passed=True))
        await soon(lambda: "b" in other.current)
        assert other.current["a"] == result(passed=False)
        assert "pullfill recheck" in other.why_not("a", "d", "p")
        assert await clear(client, "kept") == ["a"]
        await soon(lambda: "a" not in other.current)
        assert heard >= 4
        assert await kept(client, "kept") == {"b": result(passed=True)}
    finally:
        await checks.close()
        await other.close()


async def test_a_success_that_etcd_lost_is_written_again(client: EtcdClient) -> None:
    checks = await SelfChecks(client, "lost").start()
    try:
        checks.keep("a", result(passed=True))
        key = keys.record("lost", "self_checks", "a")
        for _ in range(2):
            await soon(lambda: client.get(key))
            await client.delete(key)
        assert checks.why_not("a", "d", "p") == ""
        assert checks.why_not("b", "d", "p").startswith("self_check_pending")
        assert checks.why_not("", "d", "p") == ""
    finally:
        await checks.close()


async def test_a_decode_worker_is_checking_until_each_kind_has_a_result(client: EtcdClient) -> None:
    """A worker that drains is not waited for, nor one that has left."""
    state = {"drains": WorkerState.DRAINING}
    for kind in ("a", "b", "leaves", "drains"):
        known = replace(
            record(f"prefill-{kind}", role="prefill", compat=COMPAT, computes=kind),
            state=state.get(kind, WorkerState.READY),
        )
        await client.put(keys.worker("joins", "prefill", known.instance_id), encode(known))
    results = await SelfChecks(client, "joins").start()
    ours = Ours("d", COMPAT, "ours", 4, 100, "float32", ONE_GROUP)
    checks, noted = Checks(ours, cast(Any, None), results), asyncio.Event()
    try:
        checks.join(client, "joins", noted.set)
        results.keep(pair_of(COMPAT.hash(), "ours", "a"), result(passed=False))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await noted.wait()
        assert checks.joining
        results.keep(pair_of(COMPAT.hash(), "ours", "b"), result(passed=True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await noted.wait()
        await client.delete(keys.worker("joins", "prefill", "prefill-leaves"))
        await soon(noted.is_set)
        assert not checks.joining
    finally:
        await checks.close()
        await results.close()


async def test_a_prefill_worker_follows_the_results(client: EtcdClient) -> None:
    """It pulls no jobs before it has passed with one decode worker, tells each decode worker why it
    takes none of its jobs, and claims none: but for the job of a self-check."""
    results = await SelfChecks(client, "follows").start()
    directory: Any = FakeDirectory()
    hello = Hello(prefill_instance="prefill-1", compat=COMPAT.hash(), computes="ours")
    changes: list[str] = []
    decode = [Decode(name=name) for name in ("decode-1", "decode-2")]
    for one, computes in zip(decode, "ab", strict=True):
        await one.server.start("127.0.0.1")
        directory.put(replace(one.record(), computes=computes))
    links = DecodeLinks(directory, hello, COMPAT, no_transfer_worker, kept=results)

    def told(at: Decode) -> list[str]:
        return [peer.why_not for peer in at.server.peers.values()]

    try:
        assert links.checking, "before it has begun to connect, too"
        links.start(lambda: changes.append(links.checking))
        first, second = decode
        await soon(lambda: sum(map(bool, told(first) + told(second))) == 2)
        assert all(why.startswith("self_check_pending") for why in told(first) + told(second))
        assert changes[-1].startswith("self_check_pending")
        assert [len(one.server.peers.pulling) for one in decode] == [0, 0]
        with pytest.raises(PeerUnavailable, match="self_check_pending"):
            await links.find("decode-1")
        assert (await links.find("decode-1", trial=True)).connected
        results.keep(pair_of(COMPAT.hash(), "a", "ours"), result(passed=False))
        await soon(lambda: "pullfill recheck" in told(first)[0])
        assert changes[-1], "it has not passed with anybody"
        results.keep(pair_of(COMPAT.hash(), "b", "ours"), result(passed=True))
        assert changes[-1] == ""
        await soon(lambda: [len(d.server.peers.pulling) for d in decode] == [0, 1])
        assert (await links.find("decode-2")).connected
        with pytest.raises(PeerUnavailable, match="self_check_failed"):
            await links.find("decode-1")
        assert links.knows("decode-1"), "others may reach it, so its jobs stay in the queue"
        assert all(a != b for a, b in pairwise(["", *changes])), "told of changes only"
    finally:
        await links.close()
        for one in decode:
            await one.server.stop()
        await results.close()


async def no_transfer_worker(_: Any) -> Any:
    raise AssertionError("nothing is moved")
