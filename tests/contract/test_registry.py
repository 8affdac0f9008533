"""Client, watch, settings, membership and directory against one real etcd."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from pullfill.decode_worker.self_check import Checks
from pullfill.errors import ConfigError, IncompatibleError, PeerUnavailable, RegistryUnavailable
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory, live_workers, revoke_worker
from pullfill.registry.live_settings import Settings, read_all, store
from pullfill.registry.membership import Membership
from pullfill.registry.self_checks import SelfChecks, clear, kept, pair_of
from pullfill.registry.watch import Delete, Put, Synced, WatchEvent, watch_prefix
from pullfill.wire import (
    WIRE_VERSION,
    Hello,
    QueueSettings,
    RouterConfig,
    RouterPolicy,
    SelfCheck,
    WorkerRecord,
    WorkerState,
    encode,
)
from tests.support.control_rig import Decode
from tests.support.etcd import EtcdServer
from tests.support.transfer_rigs import COMPAT
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory, compat, member, record

# ------------------------------------------------------------------ watch


async def test_watch_renews_a_silent_stream_without_a_break(client: EtcdClient, ns: str) -> None:
    broken, events = [], []

    async def watch() -> None:
        stream = watch_prefix(client, ns, on_break=lambda: broken.append(1), idle_s=0.05)
        async for event in stream:
            events.append(event)

    task = asyncio.create_task(watch())
    for i in range(20):
        await client.put(f"{ns}/{i:02}", b"")
        await asyncio.sleep(0.03 if i % 2 else 0.08)
    await soon(lambda: len([e for e in events if isinstance(e, Put)]) >= 20)
    task.cancel()
    assert [e.key for e in events if isinstance(e, Put)] == [
        f"{ns}/{i:02}".encode() for i in range(20)
    ]
    assert not broken


async def test_watch_survives_compaction_and_takes_a_big_message(
    client: EtcdClient, etcd: EtcdServer, ns: str
) -> None:
    """While the stream is away its revision is compacted. The difference still arrives."""
    events: list[WatchEvent] = []
    await client.put(f"{ns}/gone", b"")
    stream = watch_prefix(client, f"{ns}/", idle_s=0.3)
    events.append(await anext(stream))
    events.append(await anext(stream))
    # Not consuming: the iterator is between messages and has not opened its stream yet.
    await client.delete(f"{ns}/gone")
    revision = await client.put(f"{ns}/big", b"x" * 300_000)
    await asyncio.to_thread(etcd.ctl, "compact", str(revision))
    async with asyncio.timeout(20):
        while not isinstance(events[-1], Synced) or len(events) < 3:
            events.append(await anext(stream))
    await stream.aclose()
    assert [type(e) for e in events] == [Put, Synced, Delete, Put, Synced]
    assert isinstance(events[3], Put)
    assert len(events[3].value) == 300_000


# ------------------------------------------------------------------ settings


@pytest.mark.essential
async def test_settings_are_hot_and_a_bad_value_keeps_the_last_good(
    client: EtcdClient, ns: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = Settings(client, ns, RouterConfig)
    await config.start()
    assert config.current == RouterConfig()
    await store(client, ns, "router.policy", "always_remote")
    await store(client, ns, "router.max_prefill_queue_size", "3")
    await soon(lambda: config.current.max_prefill_queue_size == 3)
    assert config.current.policy is RouterPolicy.ALWAYS_REMOTE
    good = config.current

    with pytest.raises(ConfigError, match="conditional, always_local, always_remote"):
        await store(client, ns, "router.policy", "whatever")
    with caplog.at_level(logging.ERROR, "pullfill"):
        await client.put(keys.record(ns, "config", "router"), b'{"remote_timeout_s": -4}')
        await soon(lambda: "remote_timeout_s" in caplog.text)
    assert config.current == good
    with pytest.raises(ConfigError, match="remote_timeout_s"):
        await read_all(client, ns)

    with pytest.raises(ConfigError, match=r"router.policy is stored, but .*remote_timeout_s"):
        await store(client, ns, "router.policy", "always_local")
    await store(client, ns, "router.remote_timeout_s", "4.5")
    await store(client, ns, "router.policy", "unset")
    await soon(lambda: config.current == RouterConfig(remote_timeout_s=4.5))
    assert (await read_all(client, ns))["router.remote_timeout_s"] == 4.5
    await store(client, ns, "router.remote_timeout_s", "unset")
    await soon(lambda: config.current == RouterConfig())
    await store(client, ns, "router.remote_timeout_s", "5")
    await soon(lambda: config.current == RouterConfig(remote_timeout_s=5.0))
    await client.delete(keys.record(ns, "config", "router"))
    await soon(lambda: config.current == RouterConfig())
    await config.close()


async def test_settings_set_at_the_same_time_all_stay(client: EtcdClient, ns: str) -> None:
    new = {"policy": "always_local", "max_local_prefill_length": 1, "remote_timeout_s": 3.0}
    await asyncio.gather(*(store(client, ns, f"router.{key}", str(new[key])) for key in new))
    kinds = {"router": to_builtins(RouterConfig()) | new, "queue": to_builtins(QueueSettings())}
    assert await read_all(client, ns) == {
        f"{root}.{name}": value for root, fields in kinds.items() for name, value in fields.items()
    }


# --------------------------------------------------------------------------
# Membership and directory against one real etcd.


async def registered(client: EtcdClient, ns: str) -> dict[str, WorkerRecord]:
    return {record.instance_id: record for record, _ in await live_workers(client, ns)}


# ------------------------------------------------------------------ membership


async def test_both_sides_of_a_worker_are_on_one_lease(client: EtcdClient, ns: str) -> None:
    """What others do to a key is undone, and a revoked lease is noticed at once. With TTL 60 the
    next keep-alive is 20 s away: the watch of each key is what tells."""

    def make(incarnation: str) -> list[WorkerRecord]:
        return [record("worker-1", incarnation, role=role) for role in ("decode", "prefill")]

    me = Membership(client, ns, 60, make, checking=lambda role: role == "prefill")
    await me.join()
    states = {record.role: record.state for record, _ in await live_workers(client, ns)}
    assert states == {"decode": WorkerState.READY, "prefill": WorkerState.CHECKING}
    for role in states:
        key = keys.worker(ns, role, "worker-1")
        before = (await client.get(key)).value
        for vandal in (client.delete(key), client.put(key, b"garbage")):
            await vandal
            back = await soon(
                lambda key=key: client.get(key),
                good=lambda kv, before=before: kv and kv.value == before,
            )
            assert back.lease == me.lease.id
    me.note_state(WorkerState.DRAINING)
    async with asyncio.timeout(10):
        await soon(
            lambda: live_workers(client, ns),
            good=lambda all: {one.state for one, _ in all} == {WorkerState.DRAINING},
        )
    assert not me.revoked.is_set()
    assert await revoke_worker(client, ns, "worker-1")
    await asyncio.wait_for(me.revoked.wait(), 10)
    assert me.lease is None
    assert await live_workers(client, ns) == []
    assert await revoke_worker(client, ns, "worker-1") is None
    await me.leave()


async def test_a_process_of_another_wire_version_does_not_join(client: EtcdClient, ns: str) -> None:
    """It cannot read the record of the other, so it must see at least that there is one."""
    newer = msgspec.msgpack.encode({"v": WIRE_VERSION + 1, "all": "else differs"})
    await client.put(keys.worker(ns, "decode", "garbage"), b"\xc1")
    joiner = member(client, ns, "frontend-1")
    await joiner.join()
    await joiner.leave()
    await client.put(keys.worker(ns, "decode", "newer"), newer)
    with pytest.raises(
        IncompatibleError, match=r"frontend-1 cannot join .*: decode newer.*: run the"
    ):
        await joiner.join()
    assert not await registered(client, ns)


async def test_of_two_at_the_same_moment_one_leaves(
    client: EtcdClient, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pass the first check before either writes; the second check decides."""
    both_checked = asyncio.Barrier(2)
    grant = client.grant_lease

    async def late_grant(ttl_s: int) -> object:
        await both_checked.wait()
        return await grant(ttl_s)

    monkeypatch.setattr(client, "grant_lease", late_grant)
    one = member(client, ns, "decode-1")
    two = member(client, ns, "decode-2", changes={"compat": compat(dtype="float16")})
    results = await asyncio.gather(one.join(), two.join(), return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["IncompatibleError", "NoneType"]
    winner = one if results[0] is None else two
    assert [r.incarnation for r in (await registered(client, ns)).values()] == [winner.incarnation]
    await winner.leave()


async def test_etcd_that_is_away_when_a_worker_joins_is_waited_for(
    client: EtcdClient, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant, fails = client.grant_lease, [1, 2]

    async def late_grant(ttl_s: int) -> object:
        if fails:
            raise RegistryUnavailable(f"away {fails.pop()}")
        return await grant(ttl_s)

    monkeypatch.setattr(client, "grant_lease", late_grant)
    me = member(client, ns, "decode-1")
    with pytest.raises(RegistryUnavailable, match="away 2"):
        await me.join()
    await me.join(wait_s=10.0)
    assert list(await registered(client, ns)) == ["decode-1"]
    await me.leave()


async def test_of_two_workers_with_one_id_the_later_one_stays(client: EtcdClient, ns: str) -> None:
    """Else they would overwrite each other's keys for ever. The key of decode-10 begins alike."""
    started = {"decode-1": 1.0, "decode-10": 2.0}
    first, other = (
        member(client, ns, name, changes={"started_at": at}) for name, at in started.items()
    )
    await first.join()
    await other.join()
    second = member(client, ns, "decode-1", changes={"started_at": 3.0})
    await asyncio.sleep(0.3)
    assert not first.revoked.is_set()
    await second.join()
    await asyncio.wait_for(first.revoked.wait(), 10)
    await asyncio.sleep(1.0)
    there = await registered(client, ns)
    assert there["decode-1"].incarnation == second.incarnation
    assert not second.revoked.is_set()
    for one in (second, other):
        await one.leave()


# ------------------------------------------------------------------ directory


@pytest.mark.essential
async def test_directory_ignores_malformed_records_and_says_so_once(
    client: EtcdClient, ns: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = record("decode-1")
    key = keys.worker(ns, "decode", "decode-1")
    await client.put(key, encode(good))
    await client.put(keys.worker(ns, "decode", "decode-2"), encode(good))  # another's record
    directory = Directory(client, ns, ["decode", "prefill"])
    with caplog.at_level(logging.WARNING, "pullfill"):
        await directory.start()
        await client.put(key, b"\xc1 no msgpack")
        await client.put(key, b"")
        await client.put(keys.worker(ns, "prefill", "prefill-1"), encode(record("prefill-1")))
        await soon(lambda: bool(directory.workers("prefill")))
    assert directory.workers("decode") == {"decode-1": good}
    assert caplog.text.count("ignoring") == 2
    await directory.close()


# ------------------------------------------------------------------ kept results of self-checks


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
    checks = Checks("d", COMPAT, "ours", 4, 100, "float32", cast(Any, None), results)
    noted = asyncio.Event()
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
