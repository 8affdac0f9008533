"""Which decode worker gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A decode worker that may take a request now."""

    @property
    def instance_id(self) -> str: ...


C = TypeVar("C", bound=Candidate)


class Router(Protocol):
    """Chooses among workers that can all serve the request. Called once per engine request, so
    once per prompt of a batch and per choice of `n`; must not block."""

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
