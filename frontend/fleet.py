"""What this frontend knows of the load of each decode worker.

Two sources: what the workers report, at most 20 times a second, and what this frontend has sent. A
report covers our own requests, too. What it says beyond our own is taken for the load of other
frontends until the next report. Our own load is counted exactly:

    load now = load of others at the last report + our own now

Recent work of a worker is what this frontend sent there: uncached prompt tokens, and the tokens of
the answers. It fades with work, not with time: after FADE requests per worker it counts half. So
requests that come far apart still take turns. A worker that joins gets the mean: it is equal to the
others at once, and gets no flood.

Single event loop. Every method is cheap; none blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.frontend.decode_choice import WorkerView

FADE = 256
"""Requests per worker after which recent work counts half."""
_STEPS = 8
"""Work fades in so many steps."""


@dataclass(slots=True, eq=False)
class Share:
    """One request at a worker. `first` and `end` may be called again without effect.

    tokens, blocks: what it still adds to the worker's load."""

    view: WorkerView
    tokens: float
    blocks: float

    def first(self) -> None:
        """Its first token has come: the prompt is computed."""
        self.view.own_tokens -= self.tokens
        self.tokens = 0.0

    def end(self, made: int = 0) -> None:
        """It has left the worker. made: tokens of the answer that the worker has computed."""
        self.first()
        if self.blocks:
            self.view.work += made
            self.view.own_blocks -= self.blocks
            self.blocks = 0.0


class Fleet:
    """The views of the decode workers, by instance id."""

    def __init__(self) -> None:
        self.views: dict[str, WorkerView] = {}
        self._sent = 0

    def join(self, instance_id: str) -> WorkerView:
        """Return the view of a worker. It is made if there is none."""
        view = self.views.get(instance_id)
        if view is None:
            works = [other.work for other in self.views.values()]
            mean = sum(works) / len(works) if works else 0.0
            view = self.views[instance_id] = WorkerView(instance_id, work=mean)
        return view

    def drop(self, instance_id: str) -> None:
        """Forget a worker. Shares of its requests may still be ended."""
        self.views.pop(instance_id, None)

    def report(
        self, instance_id: str, queued_tokens: float, active_blocks: float, free_blocks: float
    ) -> None:
        """Take a worker's report. Unknown workers are ignored."""
        view = self.views.get(instance_id)
        if view is not None:
            view.others_tokens = max(0.0, queued_tokens - view.own_tokens)
            view.others_blocks = max(0.0, active_blocks - view.own_blocks)
            view.free_blocks = free_blocks

    def send(self, view: WorkerView, uncached: float, blocks: float) -> Share:
        """Count a request that goes to a worker.

        uncached: prompt tokens that the worker lacks. blocks: KV blocks of the prompt."""
        view.own_tokens += uncached
        view.own_blocks += blocks
        view.work += uncached
        if view.free_blocks is not None:
            view.free_blocks = max(0.0, view.free_blocks - blocks)
        self._sent += 1
        if self._sent * _STEPS >= FADE * len(self.views):
            self._sent = 0
            for each in self.views.values():
                each.work *= 0.5 ** (1 / _STEPS)
        return Share(view, uncached, blocks)
