"""Sends odd requests to a cluster and judges the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.support import web
from tests.support.cluster import MODEL, Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import ask, assert_right, random_prompt

BOUND_S = 60.0
"""For one odd request: generous, on a busy machine."""


def send(cluster: Cluster, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
    """POST one request. A dict gets the model's name. Bytes go as they are."""
    if isinstance(body, dict):
        # The standard library also writes what JSON does not have: NaN, and halves of pairs.
        body = json.dumps({"model": MODEL, **body}).encode()
    headers = {"content-type": "application/json"}
    url = f"{cluster.frontend_url}{path}"
    return web.post(url, content=body, headers=headers, timeout=BOUND_S)


def message_of(answer: httpx.Response) -> str:
    """The text of an error answer, of whichever API; of a stream, that of its error event."""
    text = answer.text
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        text = next((e for e in events if '"error"' in e), "{}")
    found: Any = json.loads(text)
    found = found.get("response", found)  # of a `response.failed`
    for key in ("error", "message"):
        found = found.get(key, found) if isinstance(found, dict) else found
    found = found.get("detail", "") if isinstance(found, dict) else found
    return str(found)


def wrong_with(answer: httpx.Response) -> str:
    """What is wrong with an answer. Empty if it is whole, or refuses the request and says why."""
    if 400 <= answer.status_code < 500:
        return "" if message_of(answer).strip() else "an error without a message"
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        json.loads(answer.text)
        return ""
    if '"error"' in answer.text:
        return "" if message_of(answer).strip() else "an error event without a message"
    whole = "data: [DONE]" in answer.text or "response.completed" in answer.text
    whole = whole or "message_stop" in answer.text or "response.incomplete" in answer.text
    return "" if whole else "the stream has no end"


@contextmanager
def unharmed(cluster: Cluster, oracle: Oracle) -> Iterator[None]:
    """Afterwards all processes are the same, the cluster is ready and answers rightly."""
    before = [worker.pid for worker in cluster.workers if worker.alive]
    yield
    assert [worker.pid for worker in cluster.workers if worker.alive] == before, "one died"
    url, count = cluster.frontend_url, len(cluster.of("decode"))
    until(lambda: web.ready(url).get("decode") == count, 20, "all decode workers are ready")
    prompt = random_prompt(300, seed=80)
    assert_right(oracle, [prompt], [ask(cluster, prompt)])
