"""What the request server stores: frontends, their requests, and the engine's unsent statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pullfill.engine import front_wire, outputs, speculation
from pullfill.engine.blame import Fault, explained, fault_of
from pullfill.errors import BadMessage
from pullfill.runtime import log

logger = log.get("decode_worker.frontends")

_STATS_S = 0.25
"""Statistics are held back for this many seconds, so that one message carries those of several
steps. While there is no output, the engine thread looks for held statistics once a second."""
_MOST_STATS = 1000
"""The statistics of at most this many steps are held."""


@dataclass(slots=True, eq=False)
class Frontend:
    """One connection.

    clogged: its send queue is full, because the frontend does not read.
    follows: it wants to know which blocks are stored and removed."""

    identity: bytes
    index: int
    last_seen: float
    name: str = ""
    clogged: bool = False
    follows: bool = False
    requests: set[str] = field(default_factory=set)

    def silent(self, now: float) -> bool:
        """Whether nothing came from the frontend for so long that it counts as gone.

        A frontend without requests sends PING half as often, so it gets more time."""
        more = 0.0 if self.requests else front_wire.PING_INTERVAL_S
        return now - self.last_seen > front_wire.SILENCE_S + more


@dataclass(slots=True, eq=False)
class Request:
    """One request that the request server has accepted.

    coming: it is not in the engine yet.
    wanted: it was not aborted since it was accepted."""

    id: str
    frontend: Frontend
    coming: bool = True
    wanted: bool = True


def refusal(request_id: str, why: Exception, instance_id: str) -> Any:
    """Return the EngineCoreOutputs that end a request that cannot be taken, and log why.

    instance_id: of this worker."""
    fault, about = fault_of(why), log.ids(request_id=request_id)
    if fault is Fault.REQUEST:
        logger.warning("request %s is refused: %s", request_id, why, extra=about)
        text = f"it is refused: {why}"
    else:
        logger.error("request %s could not be taken in", request_id, exc_info=why, extra=about)
        text = explained(why, f"decode worker {instance_id}")
    return outputs.error_outputs(request_id, text, fault)


def check_fits(request: Any, prompt_tokens: int, max_model_len: int, core: Any) -> None:
    """Refuse a request that would make vLLM's engine fail, or that it would serve only in part.

    A failure would end this worker. vLLM makes these checks only in the frontend, with the
    frontend's flags and the limits of the worker that was chosen first. If that worker dies, the
    request comes here, and this worker's `max_model_len` may be smaller. Raises BadMessage."""
    if request.resumable:
        raise BadMessage("streaming input is not supported")
    if prompt_tokens >= max_model_len:
        raise BadMessage(f"{prompt_tokens} prompt tokens, at most {max_model_len - 1}")
    speculation.check_params(core.vllm_config, request.sampling_params)


class HeldStats:
    """Holds the statistics of engine steps until they are sent.

    They are sent with the first output after _STATS_S, or after a second without an output. The
    statistics of several steps are added up into one, because a message per step costs more than
    the step's tokens. Once a step's statistics could not be added to others, all are sent with the
    next output. Those of a step that leaves no request are sent at once: no step may follow.

    told_idle: what was sent last says that no request is left."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._odd = False
        self._since = 0.0
        self.told_idle = True

    def hold(self, stats: Any, now: float) -> None:
        """Hold the SchedulerStats of one step. Beyond _MOST_STATS steps the oldest are dropped.

        now: seconds of a monotonic clock."""
        if not self._held:
            self._since = now
        self._held.append(stats)
        del self._held[:-_MOST_STATS]

    def due(self, now: float) -> bool:
        """Whether the statistics must be sent with the next output. now: as for `hold`."""
        return bool(self._held) and (
            now - self._since > _STATS_S or self._odd or outputs.idle(self._held[-1])
        )

    def turned_idle(self) -> bool:
        """Whether the statistics must be sent without an output: they say that no request is left,
        and those sent before said that some are."""
        return bool(self._held) and not self.told_idle and outputs.idle(self._held[-1])

    def take(self) -> list[Any]:
        """Remove and return everything held, oldest first. What can be added up is one entry."""
        held, self._held, self._odd = self._held, [], False
        told, plain = list[Any](), False
        for stats in held:
            if plain:
                outputs.add_up(stats, told.pop())
            told.append(stats)
            plain = outputs.plain(stats)
            self._odd |= not plain
        self.told_idle = outputs.idle(told[-1])
        return told
