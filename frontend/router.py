"""Which decode worker gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A decode worker that may take a request now."""

    @property
    def instance_id(self) -> str: ...


C = TypeVar("C", bound=Candidate)

MAX_TOGETHER = 1024
"""For how many answers with several choices the chosen worker is remembered."""


class Router(Protocol):
    """Chooses among workers that can all serve the request. Must not block.

    Called once per prompt of a batch. For `n` > 1 it is called once for all choices (`Together`).
    """

    def choose(self, prompt_token_ids: Sequence[int] | None, workers: Sequence[C]) -> C:
        """One of `workers`, which is never empty."""
        ...


class RoundRobin:
    """Each worker in turn. Position is kept by instance id, so a worker that joins or leaves
    does not make another get two in a row."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt_token_ids: Sequence[int] | None, workers: Sequence[C]) -> C:
        after = [w for w in workers if w.instance_id > self._last]
        chosen = min(after or workers, key=lambda w: w.instance_id)
        self._last = chosen.instance_id
        return chosen


class Together:
    """Sends all choices of one answer (`n` > 1) to the worker of the first one.

    So a prompt that kills workers kills only one at a time, and its prefix is computed once."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._chosen: dict[str, str] = {}

    def choose(
        self, answer: str, prompt_token_ids: Sequence[int] | None, workers: Sequence[C]
    ) -> C:
        """Return one of `workers`, which must not be empty. answer: id of the answer."""
        before = self._chosen.pop(answer, None)
        chosen = next((w for w in workers if w.instance_id == before), None)
        if chosen is None:
            chosen = self._router.choose(prompt_token_ids, workers)
        self._chosen[answer] = chosen.instance_id
        if len(self._chosen) > MAX_TOGETHER:
            del self._chosen[next(iter(self._chosen))]
        return chosen
