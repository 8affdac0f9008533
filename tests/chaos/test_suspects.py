"""Requests that kill every engine they reach, with real workers. All other requests are answered.

The workers run without a model (mock executor), so that many can be started again. A failpoint ends
the engine when it schedules a prompt that begins with a token of FATAL.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.cluster import MOCK, MODEL, Cluster, until

# tests/unit/frontend/test_dispatch_suspects.py does the same with workers that start at once.
pytestmark = pytest.mark.engine

STREAMS, TOKENS = 40, 150
FATAL = range(251, 261)
"""A worker dies when it schedules a prompt that begins with one of these tokens, and logs which."""
DIES = ";".join(f"decode.prompt.{token}=error:killed by {token}" for token in FATAL)
SLOW = ("--additional-config", '{"mock": {"step_s": 0.04}}')
ANSWER_S = 300.0


def ask(url: str, prompt: list[int], count: int) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of a greedy completion."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    reply = web.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S)
    return reply.status_code, reply.json()


def ask_again(url: str, prompt: list[int]) -> tuple[int, dict[str, Any]]:
    """A deadly prompt may come while no worker lives: then the frontend says so (503), and a client
    asks again."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        code, body = ask(url, prompt, 4)
        if code != 503 or time.monotonic() > deadline:
            return code, body
        time.sleep(0.2)


def deaths(cluster: Cluster) -> Counter[int]:
    """How many workers each deadly prompt has killed, by its first token. A worker whose engine has
    died may take a moment to exit."""
    killers = Counter[int]()
    for worker in [w for w in cluster.workers if w.role == "decode"]:
        exited = not worker.alive
        said = set(re.findall(r"FailpointError: killed by (\d+)", worker.log.read_text()))
        assert len(said) == 1 or not (said or exited), f"{worker.log.name}: {worker.tail()}"
        killers.update(map(int, said))
    return killers


def running(url: str) -> int:
    status = web.get(f"{url}/pullfill/status").json()
    return sum(worker["load"].get("running", 0) for worker in status["workers"])


@pytest.fixture
def fleet(tmp_path: Path, model_path: Path) -> Iterator[tuple[Cluster, list[str]]]:
    """Three workers that die of FATAL, and the addresses of two frontends. For each worker that has
    died another is started, as a supervisor does."""
    urls, over = [], threading.Event()
    with Cluster(tmp_path / "fleet", model_path) as cluster, ThreadPoolExecutor(1) as keeper:

        def fill() -> None:
            for _ in range(3 - len(cluster.of("decode"))):
                cluster.launch("decode", *MOCK, *SLOW, failpoints=DIES)

        def keep() -> None:
            while not over.wait(0.1):
                fill()

        cluster.start_servers()
        fill()
        for _ in range(2):
            cluster.launch("frontend", "--restart-wait", "300")
            urls.append(cluster.frontend_url)
        cluster.wait_ready(*cluster.workers)
        for url in urls:
            until(lambda url=url: web.ready(url).get("decode") == 3, 60, f"{url} sees all")
        kept = keeper.submit(keep)
        try:
            yield cluster, urls
        finally:
            over.set()
            kept.result()


@pytest.mark.essential
def test_three_deadly_prompts_at_two_frontends(fleet: tuple[Cluster, list[str]]) -> None:
    """Each frontend counts its own requests. The streams fill all slots of the surviving workers.
    Each lives for 6 s, so all are seen to run at once."""
    cluster, urls = fleet
    with ThreadPoolExecutor(STREAMS + 3) as pool:
        calls = [pool.submit(ask, urls[i % 2], [30 + i, i + 11], TOKENS) for i in range(STREAMS)]
        until(lambda: running(urls[0]) == STREAMS, 30, "all streams run")
        killers = []
        for i, token in enumerate(FATAL[:3]):
            prompt = [token, *[20] * (i + 2)]  # no other has as many tokens
            killers.append(pool.submit(ask_again, urls[i % 2], prompt))
            time.sleep(0.1)
        refused = [call.result() for call in killers]
        answers = [call.result() for call in calls]
    for code, body in answers:
        assert code == 200, body
        assert body["choices"][0]["token_ids"] == [75] * TOKENS
    for code, body in refused:
        assert code == 400, body
        message = body["error"]["message"]
        # Who was in flight at another one's death as well says so.
        assert re.match(r"[2-9] decode workers died while", message), message
    assert 0 < max(deaths(cluster).values()) <= 2, deaths(cluster)
