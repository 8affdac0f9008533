"""`pullfill up` restarts processes that die: real servers, workers with mock engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import httpx
import nats
import pytest

from pullfill.deploy import local_servers
from pullfill.deploy.state import is_alive
from pullfill.registry.client import EtcdClient
from tests.support import web
from tests.support.cluster import FLAGS, MOCK, MODEL
from tests.support.command_line import (
    SERVERS_ONLY,
    cluster,
    detached,
    entry,
    run,
)
from tests.support.prompts import random_prompt
from tests.support.waiting import until


def kill(state: Path, *names: str) -> None:
    for name in names:
        os.kill(entry(state, name).pid, signal.SIGKILL)


def wait_restarted(state: Path, restarts: int, *names: str) -> None:
    def back() -> bool:
        found = {e.name: e for e in cluster(state).processes}
        return all(found[n].restarts == restarts and is_alive(found[n]) for n in names)

    until(back, 20, f"{names} restarted {restarts} times")


def said(state: Path) -> str:
    return (state / "logs" / "supervisor.log").read_text()


def servers_answer(state: Path) -> bool:
    found = cluster(state)
    up = (local_servers.nats_ready(found.nats_url), local_servers.etcd_ready(found.etcd_url))
    return up == (None, None)


@pytest.mark.essential
def test_servers_come_back_with_their_stores(state: Path) -> None:
    """At the same addresses, with the job stream, the keys and the leases they had."""

    async def fill() -> int:
        """Return the lease of the key."""
        client = await nats.connect(before.nats_url)
        await client.jetstream().add_stream(name="jobs", subjects=["jobs.>"])
        await client.jetstream().publish("jobs.1", b"job")
        await client.close()
        etcd = await EtcdClient.connect(before.etcd_url)
        lease = (await etcd.grant_lease(60)).id
        await etcd.put("/kept", b"key", lease)
        await etcd.close()
        return lease

    async def read() -> tuple[int, bytes | None, int]:
        """Return the number of jobs in the stream, the value of the key, and the TTL of its lease
        after a renewal."""
        client = await nats.connect(before.nats_url)
        stream = await client.jetstream().stream_info("jobs")
        await client.close()
        etcd = await EtcdClient.connect(before.etcd_url)
        found = await etcd.get("/kept")
        renewed = await etcd.keep_alive(lease)
        await etcd.close()
        return stream.state.messages, found.value if found else None, renewed.ttl

    with detached(state, *SERVERS_ONLY) as launch:
        before = cluster(state)
        lease = asyncio.run(fill())
        kill(state, "nats", "etcd")
        wait_restarted(state, 1, "nats", "etcd")
        until(lambda: servers_answer(state), 20, "servers answer")
        after = cluster(state)
        assert (after.nats_url, after.etcd_url) == (before.nats_url, before.etcd_url)
        assert asyncio.run(read()) == (1, b"key", 60)
        told = json.loads(run(state, "status", "--json").stdout)
        assert {row["name"]: row["restarts"] for row in told["processes"]} == {"nats": 1, "etcd": 1}
        assert told["supervisor"] == {"pid": launch.supervisor.pid, "alive": True, "restart": True}
        assert re.search(r"nats \(pid \d+\) runs, restarts: 1", run(state, "status").stdout)


@pytest.mark.essential
def test_five_deaths_in_a_minute_are_given_up_and_told(state: Path) -> None:
    with detached(state, *SERVERS_ONLY):
        (state / "nats" / "nats.conf").write_text("listen: {nonsense")
        kill(state, "nats")
        until(lambda: "gave up after 5 deaths" in said(state), 40, "it gives up")
        until(lambda: bool(entry(state, "nats").gave_up), 20, "it says so")
        assert entry(state, "nats").restarts == 4
        assert "Parse error" in entry(state, "nats").gave_up, "the last lines of its log"
        told = run(state, "status").stdout
        assert "nats: gave up after 5 deaths in 60 s" in told
        assert "Parse error" in told
        assert local_servers.etcd_ready(cluster(state).etcd_url) is None, "the rest goes on"


@pytest.mark.essential
def test_a_supervisor_only_waits_and_the_cluster_outlives_it(state: Path) -> None:
    def switches(pid: int) -> int:
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])

    with detached(state, *SERVERS_ONLY) as launch:
        until(lambda: (state / "logs" / "supervisor.log").exists(), 20, "it waits")

        def rests() -> bool:
            before = switches(launch.supervisor.pid)
            time.sleep(0.5)
            return switches(launch.supervisor.pid) == before

        until(rests, 20, "it only looks at its disk, every 5 s")
        os.kill(launch.supervisor.pid, signal.SIGKILL)
        until(lambda: not is_alive(launch.supervisor), 20, "it is gone")
        assert servers_answer(state)
        gone = f"the supervisor (pid {launch.supervisor.pid}) is gone"
        assert gone in run(state, "status").stdout


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.essential
def test_workers_and_frontends_come_back_but_not_who_was_drained(
    state: Path, tmp_path: Path, model_path: Path
) -> None:
    """A cluster without prefill workers: each process takes 13 s of CPU to start."""
    flags = [*MOCK, *FLAGS, "--kv-cache-memory-bytes=67108864"]
    told = {"model": str(model_path), "port": 0, "prefill": 0, "vllm-args": flags}
    (tmp_path / "cluster.yaml").write_text(json.dumps(told))  # JSON is YAML
    body = {"model": MODEL, "prompt": random_prompt(700, seed=1), "max_tokens": 2}
    names = ("decode-0", "frontend-0")

    def answers() -> bool:
        try:
            reply = web.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    def ready() -> list[tuple[str, int]]:
        """Return instance id and restarts of each ready worker."""
        try:
            found = web.get(f"{url}/pullfill/status").json()["workers"]
        except httpx.HTTPError:
            return []
        return [(w["instance_id"], w["restarts"]) for w in found if w["state"] == "ready"]

    with detached(state, "-f", str(tmp_path / "cluster.yaml")):
        url = cluster(state).frontend_url
        assert answers()
        old = {name: entry(state, name) for name in names}
        kill(state, *names)
        wait_restarted(state, 1, *names)
        until(lambda: [restarts for _, restarts in ready()] == [1], 90, "seen")
        until(answers, 60, "served again")
        for name in names:
            new = entry(state, name)
            assert new.instance_id != old[name].instance_id
            assert (new.name, new.url) == (name, old[name].url)
        left = old["decode-0"].instance_id
        assert not list(Path("/dev/shm").glob(f"pullfill-{left}*"))

        kept = entry(state, "decode-0")
        kill(state, "nats", "etcd")
        wait_restarted(state, 1, "nats", "etcd")
        until(lambda: servers_answer(state), 20, "servers answer")
        until(lambda: ready() == [(kept.instance_id, 1)], 20, "the worker is the same")
        assert answers()
        assert run(state, "drain", kept.instance_id, "--wait").returncode == 0
        until(lambda: "decode-0 finished (drained)" in said(state), 20, "it is seen to leave")
        kill(state, "nats")  # the supervisor goes on, and would have started the worker by now
        wait_restarted(state, 2, "nats")
        assert entry(state, "decode-0") == kept
