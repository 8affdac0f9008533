"""Sets how many prompt tokens the next step of vLLM's scheduler may compute.

vLLM reads two numbers when it schedules a step, and both may change between steps: the most tokens
of one prompt (`--long-prefill-token-threshold`), and the most tokens of the step.
"""

from __future__ import annotations

from typing import Any

LOOK = 64
"""Tokens of a step that no single prompt gets. While a step has tokens left, vLLM looks at waiting
prompts, so those that can go to a prefill worker need not wait for a long one here."""
_LEAST = 4 * LOOK


class PrefillChunks:
    """See the module. Engine thread, between steps.

    core: vLLM's EngineCore.
    able: whether prompts may be computed in chunks at all.
    step_tokens: most tokens in a step. each: of one stream, that is one and drafts."""

    def __init__(self, core: Any) -> None:
        scheduler = core.scheduler
        self._scheduler = scheduler
        self._config = scheduler.scheduler_config
        self._threshold = int(self._config.long_prefill_token_threshold)
        self.step_tokens = int(scheduler.max_num_scheduled_tokens)
        self.able = bool(self._config.enable_chunked_prefill)
        self.each = 1 + int(scheduler.num_spec_tokens)

    def limit(self, tokens: int, prompts: int) -> None:
        """Let the next step compute at most `tokens` tokens of prompts. 0: no such limit.

        prompts: how many prompts are computed now. They share the tokens."""
        if not self.able:
            return
        if tokens <= 0 or tokens >= self.step_tokens - LOOK:
            most = self.step_tokens - LOOK if self.step_tokens >= _LEAST else 0
            self._set(most, self.step_tokens)
            return
        # Running requests come first, in any order. So their prompts must leave a token for each
        # stream among them, and some for prompts that begin.
        running = len(self._scheduler.running) * self.each
        begin = tokens // 5 if prompts else 0
        self._set(
            max(1, (tokens - begin) // max(1, prompts)),
            min(self.step_tokens, running + max(self.each, tokens)),
        )

    def leave_one(self) -> None:
        """Let no single prompt have the last token of a step, from now on. See LOOK."""
        self._threshold = min(self._threshold or self.step_tokens, self.step_tokens - 1)
        self.release()

    def release(self) -> None:
        """Set both numbers as they were before `limit`."""
        self._scheduler.max_num_scheduled_tokens = self.step_tokens
        self._config.long_prefill_token_threshold = self._threshold

    def _set(self, each: int, total: int) -> None:
        if self._threshold:
            each = min(each, self._threshold) if each else self._threshold
        self._config.long_prefill_token_threshold = each
        self._scheduler.max_num_scheduled_tokens = total
