"""What the shim keeps of one frontend and of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pullfill.engine import outputs, rpc
from pullfill.errors import BadMessage

UTILITIES = frozenset({
    "get_supported_tasks", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
    "is_sleeping", "profile", "is_scheduler_paused", "get_kv_cache_group_metadata",
    "get_weight_version",
})  # fmt: skip
"""What a frontend may call on the engine core."""
_STATS_S = 0.25
"""Statistics wait for so long. Without an output the engine thread looks once a second."""
_MOST_STATS = 1000
"""Steps whose statistics are kept at most."""


@dataclass(slots=True, eq=False)
class Frontend:
    """One connection. clogged: it has not read what it was sent."""

    identity: bytes
    index: int
    last_seen: float
    name: str = ""
    clogged: bool = False
    requests: set[str] = field(default_factory=set)

    def silent(self, now: float) -> bool:
        """Whether it is taken for gone. One without requests says PING half as often."""
        more = 0.0 if self.requests else rpc.PING_INTERVAL_S
        return now - self.last_seen > rpc.SILENCE_S + more


@dataclass(slots=True, eq=False)
class Request:
    """One request that was taken. coming: not yet in the engine. wanted: not aborted since."""

    id: str
    frontend: Frontend
    coming: bool = True
    wanted: bool = True


def check_fits(request: Any, prompt_tokens: int, max_model_len: int) -> None:
    """Raises BadMessage if vLLM's engine would fail on the request, which would end this worker.

    vLLM checks this only in its frontend, against the worker that was chosen first. If that worker
    dies, the request comes here, and this worker's `max_model_len` may be smaller."""
    if request.resumable:
        raise BadMessage("streaming input is not supported")
    if prompt_tokens >= max_model_len:
        raise BadMessage(f"{prompt_tokens} prompt tokens, at most {max_model_len - 1}")


class HeldStats:
    """Keeps the statistics of engine steps until they are sent.

    They are sent with the first output after _STATS_S, or after a second without an output.
    Statistics of several steps are added up, because to send those of each step costs more than to
    send its tokens. If some cannot be added up, they are sent with the next output."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._odd = False
        self._since = 0.0

    def hold(self, stats: Any, now: float) -> None:
        """Keep the SchedulerStats of one step. now: in seconds. Of more than _MOST_STATS steps the
        oldest are dropped."""
        if not self._held:
            self._since = now
        self._held.append(stats)
        del self._held[:-_MOST_STATS]

    def due(self, now: float) -> bool:
        """Whether they are to be sent with an output."""
        return bool(self._held) and (now - self._since > _STATS_S or self._odd)

    def take(self) -> list[Any]:
        """Return all that are kept, oldest first, and keep none. Most are added up into one."""
        held, self._held, self._odd = self._held, [], False
        told, plain = list[Any](), False
        for stats in held:
            if plain:
                outputs.add_up(stats, told.pop())
            told.append(stats)
            plain = outputs.plain(stats)
            self._odd |= not plain
        return told
