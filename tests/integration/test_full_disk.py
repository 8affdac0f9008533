"""`pullfill up` with its state directory on a disk that fills: real servers, mock engines."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import web
from tests.support.cluster import FLAGS, MOCK, MODEL
from tests.support.command_line import cluster, detached, entry, run
from tests.support.prompts import random_prompt
from tests.support.waiting import until

MIB = 200
"""etcd alone reserves 125 MiB for its log."""
_BLOCK = bytes(1 << 16)


@contextmanager
def small_disk(directory: Path, mib: int) -> Iterator[Path]:
    """Mount a tmpfs on `directory`. Skips the test where that is not allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        # --lazy: what a failed test left running may still have a log open.
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Use up all room of the disk of `directory`."""
    ballast = directory / "ballast"
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        for block in (_BLOCK, b"x"):
            try:
                while os.write(fd, block):
                    pass
            except OSError:
                continue
    finally:
        os.close(fd)
    try:
        yield
    finally:
        ballast.unlink()


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.essential
def test_a_disk_that_fills_stops_nothing(state: Path, model_path: Path) -> None:
    """Not the requests, and not the restarts. When it has room again, all is as before."""

    def answered(*, long: bool) -> None:
        nonlocal seed
        seed += 1
        prompt = random_prompt(300 if long else 30, seed=seed)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        web.post(f"{url}/v1/completions", json=body, timeout=300.0).raise_for_status()

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
        url = cluster(state).frontend_url
        log = state / "logs" / "supervisor.log"
        answered(long=True)
        before = {name: entry(state, name) for name in ("nats", "etcd", "decode-0")}
        with full(state):
            assert "is full (0 MiB free): serving goes on" in told()
            assert run(state, "doctor").stdout.count("is full (0 MiB free)") == 1
            for _ in range(4):
                answered(long=True)
                answered(long=False)
            os.kill(before["etcd"].pid, signal.SIGKILL)
            answered(long=True)
            assert entry(state, "etcd") == before["etcd"], "the record is as it was"
        until(lambda: entry(state, "nats").restarts == 1, 40, "NATS starts again")
        until(lambda: entry(state, "etcd").restarts == 1, 40, "etcd starts again")
        assert "nats starts again: it met a full disk" in log.read_text()
        until(lambda: "NATS and etcd answer" in told(), 20, "both answer")
        assert "is full" not in told()
        until(remote_again, 60, "prompts are prefilled remotely")
        assert entry(state, "nats").restarts == 1
        assert entry(state, "decode-0") == before["decode-0"]
