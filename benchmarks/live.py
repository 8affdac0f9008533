"""A cluster started as a user starts it: `pullfill up --detach`, ended by `pullfill down`.

Owner: the `with` block of `running`. Everything it started is ended at its exit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pullfill.config import ClusterFile, read_cluster_file
from pullfill.deploy import plan
from tests.support import web

CLI = [sys.executable, "-P", "-m", "pullfill.deploy.cli"]
START_LIMIT_S = 300.0


class BenchError(Exception):
    """The benchmark cannot be carried out."""


@dataclass(slots=True)
class Live:
    """A running cluster. ready_s: from the start of `up` until it said ready."""

    state_dir: Path
    ready_s: float
    cluster: ClusterFile

    @property
    def url(self) -> str:
        return self.cluster.frontend_url

    def pid(self, role: str) -> int:
        """Of the first process of a role."""
        return next(p.pid for p in self.cluster.processes if p.role == role)

    def pids(self) -> dict[int, str]:
        """All processes: pid → name."""
        return {p.pid: p.name for p in self.cluster.processes}

    def get(self, path: str) -> Any:
        """A JSON view of the frontend."""
        return web.get(self.url + path, timeout=10.0).raise_for_status().json()

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [w for w in self.get("/pullfill/status")["workers"] if w["role"] == role]

    def configure(self, **settings: object) -> None:
        """Run `pullfill config set router.NAME VALUE` for each setting.

        Raises BenchError with its output. Workers follow soon after it returns."""
        for name, value in settings.items():
            setting = [f"router.{name}", str(value)]
            done = subprocess.run(
                [*CLI, "config", "set", *setting, "--state-dir", str(self.state_dir)],
                capture_output=True,
                text=True,
                check=False,
                timeout=60.0,
            )
            if done.returncode:
                output = done.stdout[-500:] + done.stderr[-500:]
                raise BenchError(f"{' = '.join(setting)} was not set: {output}")

    def linked(self) -> set[str]:
        """Prefill workers that every ready decode worker is connected to, and that pull. A worker
        with both sides needs no connection to itself."""
        seen = [
            {w["instance_id"], *w["load"].get("prefill_workers", [])}
            for w in self.workers("decode")
        ]
        prefill = {w["instance_id"] for w in self.workers("prefill")}
        return set.intersection(prefill, *seen) if seen else set()


def wait_for(check: Callable[[], Any], within_s: float, what: str, every_s: float = 0.1) -> Any:
    """The first true value of `check`. Raises BenchError."""
    deadline = time.monotonic() + within_s
    while True:
        with suppress(httpx.HTTPError):
            if value := check():
                return value
        if time.monotonic() > deadline:
            raise BenchError(f"not within {within_s:g} s: {what}")
        time.sleep(every_s)


def end_in_order() -> None:
    """Let SIGTERM unwind the `with` blocks of the main thread, so that nothing is left running."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def running(
    state_dir: Path, *flags: str, env: dict[str, str] | None = None, drain_s: float = 60.0
) -> Iterator[Live]:
    """`up` with these flags, on a free port. Raises BenchError with the end of its output.

    drain_s: how long streams that are still open at exit may take.
    """
    command = [*CLI, "up", "--model", "demo", "--detach", "--port", "0"]
    full = {**os.environ, **(env or {})}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--state-dir", str(state_dir), *flags],
            capture_output=True,
            text=True,
            check=False,
            timeout=START_LIMIT_S,
            env=full,
        )
        took = time.monotonic() - begin
        if done.returncode:
            raise BenchError(f"`pullfill up` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        yield Live(state_dir, took, read_cluster_file(state_dir))
    finally:
        subprocess.run(
            [*CLI, "down", "--state-dir", str(state_dir), "--timeout", f"{drain_s:g}"],
            capture_output=True,
            check=False,
            timeout=60.0 + 2 * drain_s,
        )


def ask(http: httpx.Client, prompt: list[int], tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Return an answer of the demo model, `tokens` long, and the request's explain record."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True}  # fmt: skip
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    told: dict[str, Any] = wait_for(
        lambda: http.get(f"/pullfill/requests/{answer['id']}").raise_for_status().json(),
        5.0, "a record of the request", 0.02,
    )  # fmt: skip
    return answer["choices"][0]["token_ids"], told


def demo_vocabulary() -> int:
    """Token ids of the demo model are below this. It must have been made."""
    config = json.loads((plan.demo_directory() / "config.json").read_text())
    return int(config["vocab_size"])


@contextmanager
def child(
    command: Sequence[str],
    log: Path,
    env: dict[str, str] | None = None,
    patience_s: float = 30.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own with its output in `log`; ended (SIGTERM, then SIGKILL) at exit.

    What it started and left behind is killed with it.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            process_group=0,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
