"""Client, leases, watch and settings against one real etcd."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from msgspec import to_builtins

from pullfill.errors import ConfigError, RegistryUnavailable
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.registry.watch import Delete, Put, Synced, WatchEvent, watch_prefix
from pullfill.wire import RouterConfig, RouterPolicy
from tests.support.etcd import EtcdServer, free_ports
from tests.support.waiting import soon

# ------------------------------------------------------------------ client


async def test_many_watches_do_not_block_a_put(client: EtcdClient, ns: str) -> None:
    async def first(i: int) -> None:
        async for event in watch_prefix(client, f"{ns}/{i}/"):
            if isinstance(event, Put):
                return

    watches = [asyncio.create_task(first(i)) for i in range(40)]
    await asyncio.sleep(0.2)
    for i in range(40):
        await client.put(f"{ns}/{i}/k", b"")
    await asyncio.wait_for(asyncio.gather(*watches), 20)


async def test_nobody_there() -> None:
    told: list[str] = []
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(RegistryUnavailable, match=r"did not answer within 0\.3 s.*--etcd"):
        await EtcdClient.connect(url, wait_s=0.3, on_retry=told.append)
    assert told
    assert all(url in line for line in told)


async def test_a_dead_endpoint_among_several_is_passed_over(etcd: EtcdServer, ns: str) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    client = await EtcdClient.connect(f"{dead},{etcd.url}", wait_s=10)
    await client.put(ns, b"")
    await client.close()
    with pytest.raises(RegistryUnavailable, match="closed"):
        await client.get(ns)


async def test_a_hung_etcd_times_out(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        client = await EtcdClient.connect(etcd.url, wait_s=10, timeout_s=0.3)
        etcd.pause()
        for call in (client.get("a"), client.put("a", b""), client.grant_lease(5)):
            with pytest.raises(RegistryUnavailable, match="does not answer"):
                await asyncio.wait_for(call, 10)
        assert client.last_failed_at > client.last_ok_at
        etcd.resume()
        await client.ping(10)
        await client.close()


# ------------------------------------------------------------------ leases


# ------------------------------------------------------------------ watch


async def test_watch_renews_a_silent_stream_without_a_break(client: EtcdClient, ns: str) -> None:
    broken, events = [], []

    async def watch() -> None:
        stream = watch_prefix(client, ns, on_break=lambda: broken.append(1), idle_s=0.05)
        async for event in stream:
            events.append(event)

    task = asyncio.create_task(watch())
    for i in range(20):
        await client.put(f"{ns}/{i}", b"")
        await asyncio.sleep(0.03 if i % 2 else 0.08)
    await soon(lambda: len([e for e in events if isinstance(e, Put)]) >= 20)
    task.cancel()
    assert [e.key for e in events if isinstance(e, Put)] == [
        f"{ns}/{i}".encode() for i in range(20)
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
    await config.set("policy", "always_remote")
    await config.set("max_prefill_queue_size", "3")
    await soon(lambda: config.current.max_prefill_queue_size == 3)
    assert config.current.policy is RouterPolicy.ALWAYS_REMOTE
    good = config.current

    with pytest.raises(ConfigError, match="conditional, always_local, always_remote"):
        await config.set("policy", "whatever")
    with caplog.at_level(logging.ERROR, "pullfill"):
        await client.put(keys.config(ns, "router"), b'{"remote_timeout_s": -4}')
        await soon(lambda: "remote_timeout_s" in caplog.text)
    assert config.current == good
    with pytest.raises(ConfigError, match="remote_timeout_s"):
        await config.get_all()

    await config.set("remote_timeout_s", "4.5")
    await soon(lambda: config.current == RouterConfig(remote_timeout_s=4.5))
    assert (await config.get_all())["router.remote_timeout_s"] == 4.5
    await config.set("remote_timeout_s", "unset")
    await soon(lambda: config.current == RouterConfig())
    await config.set("remote_timeout_s", "5")
    await soon(lambda: config.current == RouterConfig(remote_timeout_s=5.0))
    await client.delete(keys.config(ns, "router"))
    await soon(lambda: config.current == RouterConfig())
    await config.close()


async def test_settings_set_at_the_same_time_all_stay(client: EtcdClient, ns: str) -> None:
    config = Settings(client, ns, RouterConfig)
    await asyncio.gather(
        config.set("policy", "always_local"),
        config.set("max_local_prefill_length", "1"),
        config.set("max_prefill_queue_size", "2"),
        config.set("remote_timeout_s", "3"),
    )
    defaults = {f"router.{name}": value for name, value in to_builtins(RouterConfig()).items()}
    assert await config.get_all() == defaults | {
        "router.policy": "always_local",
        "router.max_local_prefill_length": 1,
        "router.max_prefill_queue_size": 2,
        "router.remote_timeout_s": 3.0,
    }
