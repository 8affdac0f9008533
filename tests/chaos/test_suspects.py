"""Requests that end every engine they reach, with real workers: the fleet and all others live on.

The workers run without a model (mock executor), so that many can be started again. A failpoint ends
the engine when it schedules a prompt that begins with FATAL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import suspects as command
from pullfill.engine.mock.model import MockSettings
from tests.support import web
from tests.support.cluster import MODEL, Cluster, until

# tests/contract/test_frontend_refused.py is the short form, with workers that start at once.
pytestmark = [pytest.mark.engine, pytest.mark.long]

FATAL = 251
MOCK = ("--distributed-executor-backend", "pullfill.engine.mock.executor.MockExecutor")
SLOW = ("--additional-config", '{"mock": {"step_s": 0.02}}')
ANSWER_S = 800.0


class Keeper:
    """Starts another decode worker for each that has died, as a supervisor does."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.cluster = cluster
        self.count = count
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def launch(self) -> None:
        self.cluster.launch("decode", *MOCK, *SLOW, failpoints=f"decode.prompt.{FATAL}=error:ouch")

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            for _ in range(self.count - len(self.cluster.of("decode"))):
                self.launch()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def deaths(self) -> int:
        return sum(w.role == "decode" and not w.alive for w in self.cluster.workers)


@contextmanager
def fleet(directory: Path, model_path: Path, decode: int = 3) -> Iterator[tuple[Keeper, list[str]]]:
    """So many workers that die of FATAL, and the addresses of two frontends."""
    cluster = Cluster(directory, model_path)
    keeper = Keeper(cluster, decode)
    urls = []
    try:
        cluster.start_servers()
        for _ in range(decode):
            keeper.launch()
        for _ in range(2):
            cluster.launch("frontend", "--restart-wait", "300")
            urls.append(cluster.frontend_url)
        cluster.wait_ready(*cluster.workers)
        for url in urls:
            until(lambda url=url: ready(url) == decode, 60, f"{url} sees all")  # type: ignore[misc]
        yield keeper, urls
    finally:
        keeper.stop()
        cluster.stop()


def ready(url: str) -> int:
    try:
        count: int = web.get(f"{url}/ready").json()["decode"]
    except httpx.HTTPError:
        return -1
    return count


def ask(url: str, prompt: list[int], count: int) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of a greedy completion."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    reply = web.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S)
    return reply.status_code, reply.json()


def run(keeper: Keeper, urls: list[str], streams: int, deadly: int, tokens: int) -> None:
    """All through the first frontend."""
    prompts = [[FATAL, 20 + i] for i in range(deadly)]
    with ThreadPoolExecutor(streams + deadly) as pool:
        calls = [pool.submit(ask, urls[0], [30 + i, i + 11], tokens) for i in range(streams)]
        until(lambda: running(urls[0]) == streams, 30, "all streams run")
        killers = []
        for prompt in prompts:
            killers.append(pool.submit(ask, urls[0], prompt, 4))
            time.sleep(0.1)
        refused = [call.result() for call in killers]
        answers = [call.result() for call in calls]
    for code, body in answers:
        assert code == 200, body
        assert body["choices"][0]["token_ids"] == [MockSettings().token] * tokens
    for code, body in refused:
        assert code == 400, body
        assert "2 decode workers died" in body["error"]["message"], body


def status(url: str) -> dict[str, Any]:
    found: dict[str, Any] = web.get(f"{url}/pullfill/status", timeout=10).json()
    return found


def running(url: str) -> int:
    return sum(worker["load"].get("running", 0) for worker in status(url)["workers"])


def check_refused_and_clear(keeper: Keeper, urls: list[str], deadly: int) -> None:
    """The other frontend refuses what this one has refused, until the command allows it."""
    known = until(
        lambda: (rows := status(urls[1])["suspects"]) and len(rows) == deadly and rows, 20, "listed"
    )
    before = keeper.deaths
    code, body = ask(urls[1], [FATAL, 20], 4)
    assert code == 400
    assert "are refused for another" in body["error"]["message"]
    assert keeper.deaths == before
    ref = ClusterRef(keeper.cluster.namespace, keeper.cluster.etcd.url, keeper.cluster.nats.url)
    command.clear(ref, known[0]["fingerprint"])
    command.clear(ref, None)
    for url in urls:
        until(lambda url=url: not status(url)["suspects"], 20, "cleared")  # type: ignore[misc]


def test_a_deadly_prompt_ends_two_of_three_workers(tmp_path: Path, model_path: Path) -> None:
    with fleet(tmp_path / "fleet", model_path) as (keeper, urls):
        run(keeper, urls, streams=9, deadly=1, tokens=150)
        assert keeper.deaths == 2
        check_refused_and_clear(keeper, urls, 1)


@pytest.mark.timeout(900)  # up to 23 engines are started, on two cores
def test_forty_streams_and_ten_deadly_prompts(tmp_path: Path, model_path: Path) -> None:
    with fleet(tmp_path / "fleet", model_path) as (keeper, urls):
        keeper.start()
        run(keeper, urls, streams=40, deadly=10, tokens=300)
        assert keeper.deaths <= 20, "two for each"
        check_refused_and_clear(keeper, urls, 10)
