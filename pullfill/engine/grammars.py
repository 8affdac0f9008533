"""Structured output that cannot hold up an engine.

vLLM asks each request's grammar for a mask of allowed tokens, on the engine thread, before every
step. Some small grammars need seconds for one mask (nested bounded repetitions in a regex), and no
other stream gets a token meanwhile. `bound` wraps the grammar of one request: a grammar that takes
longer than SLOW_S ends its own request. The first mask is tried on the thread that compiles.

vLLM's seam is the `grammar` of a StructuredOutputRequest, which takes any StructuredOutputGrammar.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from pullfill.runtime import log

logger = log.get("engine.grammars")

# Most CPU seconds for one mask or one token. Usual ones take microseconds. A busy machine does not
# change the CPU time.
SLOW_S = 0.25
SLOW = (
    f"the structured output of the request is too complex: one token takes more than {SLOW_S:g} s. "
    "Use fewer nested repetitions and alternatives"
)


class TooSlow(Exception):
    """The first mask of a grammar takes longer than SLOW_S."""


class BoundedGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """Wraps a grammar and measures its CPU time.

    slow: it has taken too long once. From then on it accepts no token."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.slow = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        started = time.thread_time()
        accepted = bool(self._inner.accept_tokens(request_id, tokens))
        self._look(started)
        return accepted and not self.slow  # False makes vLLM end the request with an error

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return list(self._inner.validate_tokens(tokens))

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        started = time.thread_time()
        self._inner.fill_bitmask(bitmask, batch_index)
        self._look(started)

    def is_terminated(self) -> bool:
        return bool(self._inner.is_terminated())

    def reset(self) -> None:
        self._inner.reset()

    def _look(self, started: float) -> None:
        if time.thread_time() - started > SLOW_S:
            self.slow = True


def bound(request: Any, core: Any) -> None:
    """Wrap the grammar that vLLM compiles for a Request with structured output. Returns at once.

    The threads that compile also try the first mask.

    core: vLLM's EngineCore."""
    structured = request.structured_output_request
    compiling = structured._grammar
    if not isinstance(compiling, Future):
        return
    words = -(-core.vllm_config.model_config.get_vocab_size() // 32)

    def tried() -> BoundedGrammar:
        grammar = BoundedGrammar(compiling.result())
        grammar.fill_bitmask(torch.full((1, words), -1, dtype=torch.int32), 0)
        if grammar.slow:
            raise TooSlow(SLOW)
        return grammar

    # The pool runs jobs in order, so `compiling` is done or has a thread when this one runs.
    structured.grammar = core.structured_output_manager.executor.submit(tried)


def why_ended(request: Any) -> str:
    """Why the structured output of a vLLM Request ended it with an error. For the user."""
    grammar = request.structured_output_request.grammar
    if isinstance(grammar, TooSlow) or getattr(grammar, "slow", False):
        return SLOW
    if isinstance(grammar, Exception):
        text = " ".join(str(grammar).split())[:500] or type(grammar).__name__
        return f"the structured output of the request does not compile: {text}"
    out = max(0, request.num_output_tokens - 1)
    return (
        "the structured output of the request allows no token after "
        f"{out} tokens of the answer: no text matches it"
    )
