"""vLLM's CPU worker with seeds that survive chunked prefill. Named by `--worker-cls`.

vLLM samples after every chunk of a prompt. For a chunk that is not the last one, it drops the token
and rewinds the request's generator: `generator.set_offset(generator.get_offset() - 4)`. CPU
generators of PyTorch have no offset and raise, which ends the engine. The generators made here
rewind to their state before the step, so a seeded answer does not depend on the chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


class RewindableGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator. `set_offset` restores the state of the last `mark`, whatever the offset."""

    _marked: torch.Tensor

    @classmethod
    def like(cls, generator: torch.Generator) -> RewindableGenerator:
        """A generator that draws what `generator` would draw next."""
        made = cls(device="cpu")
        made.set_state(generator.get_state())
        return made

    def mark(self) -> None:
        """Remember the state. Costs a copy of 5 KB."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.set_state(self._marked)


class SeededCPUWorker(CPUWorker):  # type: ignore[misc]
    """Replaces the generator of each seeded request before the request is sampled."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if not self.use_v2_model_runner:  # that one keeps seeds, and needs no help
            batch = self.model_runner.input_batch
            for index, generator in batch.generators.items():
                if not isinstance(generator, RewindableGenerator):
                    generator = RewindableGenerator.like(generator)
                    batch.generators[index] = generator
                    # A preempted request gets its generator back from here.
                    self.model_runner.requests[batch.req_ids[index]].generator = generator
                generator.mark()
        return super().sample_tokens(grammar_output)
