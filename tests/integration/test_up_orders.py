"""`pullfill scale`, `restart` and `upgrade` change a running cluster: real servers, mock engines.

The cluster is started from a file. Clients ask all the time, and none may notice. A short test is
in test_up_keeps.py, which has a cluster for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pullfill.deploy.procs import is_alive
from pullfill.deploy.state import StateDir, identity
from pullfill.testing.mock_model import MockSettings
from tests.support import web
from tests.support.cluster import FLAGS
from tests.support.command_line import SERVERS_ONLY, cluster, detached, entry, run, wait_for
from tests.support.deadly import MOCK, SLOW, ask
from tests.support.prompts import random_prompt

LENGTH = 60


def file_of(directory: Path, model_path: Path, **more: int) -> str:
    """Write a file for `up`. Return its path. JSON is YAML."""
    flags = [*MOCK, *SLOW, *FLAGS, "--kv-cache-memory-bytes=67108864"]
    told = {"model": str(model_path), "port": 0, "vllm-args": flags, **more}
    path = directory / "cluster.yaml"
    path.write_text(json.dumps(told | {"set": {"router.max_local_prefill_length": 64}}, indent=1))
    return str(path)


@contextmanager
def clients(url: str, count: int) -> Iterator[list[int]]:
    """So many clients ask one request after the other. Gives the status codes so far."""
    codes: list[int] = []
    wrong: list[object] = []
    stop = threading.Event()

    def client(number: int) -> None:
        seed = 1000 * number
        while not stop.is_set():
            seed += 1
            try:
                code, body = ask(url, random_prompt(30 if seed % 3 else 300, seed=seed), LENGTH)
            except httpx.HTTPError as exc:
                wrong.append(exc)
                return
            codes.append(code)
            if code != 200 or body["choices"][0]["token_ids"] != [MockSettings().token] * LENGTH:
                wrong.append((code, body))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield codes
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def order(state: Path, *words: str) -> str:
    done = run(state, *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ready(state: Path) -> dict[str, int]:
    """The number of ready workers by role."""
    rows = web.get(f"{cluster(state)['frontend_url']}/pullfill/status").json()["workers"]
    roles = [row["role"] for row in rows if row["state"] == "ready"]
    return {role: roles.count(role) for role in roles}


def alive(state: Path) -> set[str]:
    file = StateDir(state).cluster()
    assert file is not None
    return {e.name for e in file.processes if is_alive(identity(e))}


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_upgrade_is_not_noticed(state: Path, tmp_path: Path, model_path: Path) -> None:
    """Of one worker of each role and one frontend: each has its successor beside it."""
    with detached(state, "-f", file_of(tmp_path, model_path)):
        url = cluster(state)["frontend_url"]
        before = {name: entry(state, name) for name in alive(state)}
        with clients(url, 4) as codes:
            told = order(state, "upgrade")
            asked = len(codes)
            wait_for(lambda: len(codes) > asked + 8, "clients are served by the new ones", 60)
        steps = [line.split(" after")[0] for line in told.splitlines()]
        for name in ("prefill-0", "decode-0", "frontend-0"):
            begin = steps.index(f"{name}-next starts")
            assert steps[begin : begin + 4] == [
                f"{name}-next starts", f"{name}-next ready", f"{name} drains", f"{name} has ended",
            ]  # fmt: skip
        after = {name: entry(state, name) for name in alive(state)}
        assert set(after) == set(before)
        for name in ("nats", "etcd"):
            assert after.pop(name) == before[name]
        for name, new in after.items():
            assert new["instance_id"] != before[name]["instance_id"]
            assert new["log"] == before[name]["log"]
            assert Path(new["log"]).stat().st_size > 0
        assert cluster(state)["frontend_url"] == url


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_many_orders_lose_no_request(state: Path, tmp_path: Path, model_path: Path) -> None:
    """Each kind of order, several times, while eight clients ask."""

    def carried_out(words: str, **workers: int) -> None:
        order(state, *words.split())
        wait_for(lambda: ready(state) == workers, f"{workers} after {words}", 120)
        asked = len(codes)
        wait_for(lambda: len(codes) > asked + 16, f"clients are served after {words}", 120)

    with detached(state, "-f", file_of(tmp_path, model_path, decode=2)) as launch:
        with clients(cluster(state)["frontend_url"], 8) as codes:
            carried_out("scale prefill=2", decode=2, prefill=2)
            before = entry(state, "decode-0")
            carried_out("restart decode-0 prefill-0", decode=2, prefill=2)
            again = entry(state, "decode-0")
            assert again["instance_id"] != before["instance_id"]
            assert again["restarts"] == 0
            carried_out("upgrade frontend-0 decode-1", decode=2, prefill=2)
            carried_out("scale decode=3 prefill=0", decode=3)
            carried_out("restart decode-2 decode-1 decode-0", decode=3)
            carried_out("scale decode=1 prefill=1", decode=1, prefill=1)
            carried_out("upgrade", decode=1, prefill=1)
            carried_out("scale decode=2", decode=2, prefill=1)
            carried_out("restart decode-1 decode-0 prefill-0", decode=2, prefill=1)
        assert is_alive(launch.supervisor)


def test_what_no_supervisor_can_do_is_said(state: Path) -> None:
    def refused(*words: str) -> str:
        done = run(state, *words)
        assert done.returncode in (1, 2), done.stdout
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert "no cluster runs from" in refused("scale", "prefill=1")
    assert "no cluster runs from" in refused("restart", "decode-0")
    with detached(state, *SERVERS_ONLY):
        assert "no worker or frontend 'decode-0'" in refused("restart", "decode-0")
        assert "cannot serve" in refused("scale", "frontend=1")
    with detached(state, *SERVERS_ONLY, "--no-restart"):
        assert "nobody supervises" in refused("scale", "decode=1")
