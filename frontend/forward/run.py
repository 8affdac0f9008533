"""One request on its way through the stages: which servers it counts at, and what became of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pullfill.frontend.forward.bodies import Prompt
from pullfill.frontend.forward.choice import Pick
from pullfill.frontend.forward.contract import Call
from pullfill.frontend.forward.exchange import StageFailed
from pullfill.frontend.forward.servers import Server
from pullfill.wire import ForwardStage

NAMED = "named"
"""Result of the prefill stage with single dispatch: the decode server was told to start it."""


@dataclass(slots=True)
class Run:
    """See the module. whole: why the request has no prefill stage, or empty.

    bad: servers that failed it. risky: how often, by whether they answered (`stock.RISKY`).
    picks: what counts in the load of servers until it has ended. tails: stages that go on beside
    the answer."""

    call: Call
    prompt: Prompt
    whole: str
    bad: set[Server] = field(default_factory=set)
    picks: list[Pick] = field(default_factory=list)
    tails: list[asyncio.Task[bool]] = field(default_factory=list)
    risky: Counter[bool] = field(default_factory=Counter)

    async def end(self) -> None:
        """End what belongs to one attempt."""
        for pick in self.picks:
            pick.end()
        for task in self.tails:
            task.cancel()
        await asyncio.gather(*self.tails, return_exceptions=True)
        self.picks.clear()
        self.tails.clear()

    @contextlib.contextmanager
    def noted(self, stage: str, pick: Pick) -> Iterator[None]:
        """Note in `call.stages` what becomes of a stage."""
        begin, result = self.call.ms(), "ok"
        try:
            yield
        except StageFailed as exc:
            result = exc.why
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self.note(stage, pick, result, begin)

    def note(self, stage: str, pick: Pick, result: str, begin_ms: float) -> None:
        """Note that a stage ends now."""
        self.call.stages.append(
            ForwardStage(
                stage=stage,
                server=pick.server.url,
                result=result,
                begin_ms=begin_ms,
                end_ms=self.call.ms(),
                choice=pick.choice,
                source=", ".join(pick.server.sources),
            )
        )
