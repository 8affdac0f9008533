"""Chooses the decode worker for a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pullfill.frontend.decode_connection import DecodeConnection

MAX_TOGETHER = 1024
"""For how many answers with several choices the worker is remembered."""


class Balancer(Protocol):
    """Chooses among workers that can all serve the request. Must not block."""

    def choose(
        self, prompt_token_ids: Sequence[int] | None, workers: Sequence[DecodeConnection]
    ) -> DecodeConnection:
        """Return one of `workers`, which is never empty. Called once per prompt of a batch."""
        ...


class RoundRobin:
    """Takes each worker in turn.

    It remembers the last worker's instance id, not a position. So a worker that joins or leaves
    does not make another one get two requests in a row."""

    def __init__(self) -> None:
        self._last = ""

    def choose(
        self, prompt_token_ids: Sequence[int] | None, workers: Sequence[DecodeConnection]
    ) -> DecodeConnection:
        after = [w for w in workers if w.instance_id > self._last]
        chosen = min(after or workers, key=lambda w: w.instance_id)
        self._last = chosen.instance_id
        return chosen


class Together:
    """Sends all choices of one answer (`n` > 1) to one worker, which a balancer chooses.

    So a prompt that kills workers kills only one at a time, and its prefix is computed once."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._chosen: dict[str, str] = {}

    def choose(
        self,
        answer: str,
        prompt_token_ids: Sequence[int] | None,
        workers: Sequence[DecodeConnection],
    ) -> DecodeConnection:
        """Return one of `workers`, which must not be empty.

        answer: id of an answer with several choices, "" for any other."""
        if not answer:
            return self._balancer.choose(prompt_token_ids, workers)
        before = self._chosen.pop(answer, None)
        chosen = next((w for w in workers if w.instance_id == before), None)
        if chosen is None:
            chosen = self._balancer.choose(prompt_token_ids, workers)
        self._chosen[answer] = chosen.instance_id
        if len(self._chosen) > MAX_TOGETHER:
            del self._chosen[next(iter(self._chosen))]
        return chosen
