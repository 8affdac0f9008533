"""Which prompts the engine computes, if a step may compute only so many (`--concurrency`).

A prompt *takes a turn* when vLLM begins to compute it. It gives the turn back when its last chunk
is scheduled, so the next prompt begins in the step after that. A prompt without a turn waits:

- The decode worker has a prefix that this engine lacks: the prefix is read meanwhile. vLLM is told
  of the read's end once there is a turn, because vLLM computes the prompt in the next step then.
- Otherwise: vLLM is answered that its hit is not known yet. It asks again in the next step.

vLLM's own limits (`--max-num-seqs`, `--max-num-active-seqs`) would not do: at the limit vLLM looks
at no waiting request, so it does not let a prefix be read either. Nor does it once a step is full.
So a prompt that others wait for leaves one token of each step (`PrefillChunks.leave_one`).

What vLLM's KV offloading loads takes its turn before the load.

Engine thread, except `read_ended`.
"""

from __future__ import annotations

from collections import deque

from pullfill.prefill_worker.task import PrefillTask

Read = tuple[PrefillTask, BaseException | None]
"""A prefix read that has ended: its task, and why it failed."""


class Turns:
    """See the module. Each read that has ended is handed out once, by `reads`.

    most: prompts that have a turn at once, at most. 0: any number.
    _ended, _held: reads that have ended, and those of them that wait for a turn."""

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._taken: set[str] = set()
        self._ended: deque[Read] = deque()
        self._held: list[Read] = []

    def free(self, request_id: str) -> bool:
        """Whether the request has a turn, or could take one."""
        taken = self._taken
        return not self._most or request_id in taken or len(taken) < self._most

    def take(self, request_id: str) -> None:
        """Note that the engine computes the request's prompt."""
        if self._most:
            self._taken.add(request_id)

    def give_back(self, request_id: str) -> None:
        """Note that no later step computes the prompt. Harmless if repeated."""
        self._taken.discard(request_id)

    # ------------------------------------------------------------------ prefix reads

    def read_ended(self, task: PrefillTask, failure: BaseException | None) -> None:
        """Note that the task's prefix was read, or could not be. From any thread."""
        self._ended.append((task, failure))

    @property
    def has_reads(self) -> bool:
        """Whether `reads` has something to look at. It may still return nothing."""
        return bool(self._ended) or any(self._passes(task) for task, _ in self._held)

    def reads(self) -> list[Read]:
        """Return the reads that vLLM can be told of now. Their prompts take their turns."""
        while self._ended:
            self._held.append(self._ended.popleft())
        told: list[Read] = []
        for read in list(self._held):
            if self._passes(task := read[0]):
                self._held.remove(read)
                told.append(read)
                if not task.cancelled:
                    self.take(task.request_id)
        return told

    def _passes(self, task: PrefillTask) -> bool:
        # vLLM has aborted a cancelled one, or is about to. It frees the blocks after the report.
        return task.cancelled or self.free(task.request_id)
