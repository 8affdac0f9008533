"""What runs on the engine thread of an elastic worker: the hooks of both sides."""

from __future__ import annotations

from typing import Any

from pullfill.engine.host import EngineHooks
from pullfill.engine.requests import PREFILL_CLIENT
from pullfill.prefill_worker.side import PrefillHooks


class ElasticHooks(EngineHooks):
    """Calls both sides. Outputs of prefill jobs have a client index of their own."""

    def __init__(self, prefill: PrefillHooks) -> None:
        self.decode, self.prefill = EngineHooks(), prefill

    def use(self, decode: EngineHooks) -> None:
        """The decode side begins."""
        self.decode = decode

    def before_step(self) -> bool:
        wanted = self.decode.before_step()
        return self.prefill.before_step() or wanted

    def after_step(self, running: int) -> None:
        self.decode.after_step(running)
        self.prefill.after_step(running)

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        if (jobs := outputs.pop(PREFILL_CLIENT, None)) is not None:
            self.prefill.on_outputs({PREFILL_CLIENT: jobs})
            # vLLM sends a step's statistics with one of its outputs. Frontends need them, and get
            # the outputs of clients only.
            for other in outputs.values():
                other.scheduler_stats = other.scheduler_stats or jobs.scheduler_stats
                break
        if outputs:
            self.decode.on_outputs(outputs)

    def on_failed_step(self, untouched: set[str]) -> None:
        self.decode.on_failed_step(untouched)
