"""vLLM's Requests, made on a thread beside the engine's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pullfill.engine.requests import prepare
from pullfill.wire import u32


class Core:
    """An EngineCore. meanwhile: what the engine thread does in the middle of a call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.meanwhile: list[Callable[[], object]] = []

    def request_block_hasher(self, request: Any) -> list[int]:
        return []

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        if self.meanwhile:
            self.meanwhile.pop()()
        tokens = request.prompt_token_ids
        self.seen.append((len(tokens), self.request_block_hasher))
        return SimpleNamespace(_all_token_ids=tokens, block_hashes=[], num_tokens=len(tokens)), 0


def test_a_long_prompt_takes_no_hasher_from_the_engine_thread() -> None:
    """A request without block hashes would end the engine when its blocks are cached."""
    core = Core()
    short = SimpleNamespace(prompt_token_ids=[1])
    core.meanwhile.append(lambda: core.preprocess_add_request(short))
    request = SimpleNamespace(prompt_token_ids=None)
    for _ in prepare(core, request, memoryview(u32.pack(range(5000)))):
        pass
    assert core.seen == [(1, core.request_block_hasher), (5000, None)]
