"""Prompts that end every engine they reach, and those who send them."""

from __future__ import annotations

import time
from typing import Any

from tests.support import web
from tests.support.cluster import MODEL

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
