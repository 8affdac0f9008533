"""`pullfill up` with its state directory on a disk that fills: real servers, mock engines."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import web
from tests.support.cluster import FLAGS, MOCK
from tests.support.command_line import cluster, detached, entry, run, wait_for
from tests.support.deadly import ask
from tests.support.prompts import random_prompt
from tests.support.small_disk import full, small_disk

MIB = 200
"""etcd alone reserves 125 MiB for its log."""


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.essential
def test_a_disk_that_fills_stops_nothing(state: Path, model_path: Path) -> None:
    """Not the requests, and not the restarts. When it has room again, all is as before."""

    def answered(*, long: bool) -> None:
        nonlocal seed
        seed += 1
        code, body = ask(url, random_prompt(300 if long else 30, seed=seed), 2)
        assert code == 200, body

    def computed() -> int:
        """By the prefill worker."""
        rows = web.get(f"{url}/pullfill/status").json()["workers"]
        return sum(int(row["load"].get("completed", 0)) for row in rows)

    def remote_again() -> bool:
        before = computed()
        answered(long=True)
        return computed() > before

    def told() -> str:
        return run(state, "status").stdout

    seed = 0
    small = "--kv-cache-memory-bytes=67108864"
    flags = ("--model", str(model_path), "--port", "0", *MOCK, *FLAGS, small)
    with small_disk(state, MIB), detached(state, *flags, "--set", "router.policy=always_remote"):
        url = cluster(state)["frontend_url"]
        log = state / "logs" / "supervisor.log"
        answered(long=True)
        before = {name: entry(state, name) for name in ("nats", "etcd", "decode-0")}
        with full(state):
            assert "is full (0 MiB free): serving goes on" in told()
            assert run(state, "doctor").stdout.count("is full (0 MiB free)") == 1
            for _ in range(4):
                answered(long=True)
                answered(long=False)
            os.kill(before["etcd"]["pid"], signal.SIGKILL)
            answered(long=True)
            assert entry(state, "etcd") == before["etcd"], "the record is as it was"
        wait_for(lambda: entry(state, "nats")["restarts"] == 1, "NATS starts again", 40)
        wait_for(lambda: entry(state, "etcd")["restarts"] == 1, "etcd starts again", 40)
        assert "nats starts again: it met a full disk" in log.read_text()
        wait_for(lambda: "NATS and etcd answer" in told(), "both answer")
        assert "is full" not in told()
        wait_for(remote_again, "prompts are prefilled remotely", 60)
        assert entry(state, "nats")["restarts"] == 1
        assert entry(state, "decode-0") == before["decode-0"]
