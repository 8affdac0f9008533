"""A decode and a prefill worker with real vLLM on GPUs, and one plain engine to compare with.

Workers are started, not forked: CUDA does not survive a fork.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.checked import Checked, checked
from tests.support.cluster import Cluster, Worker
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt

BACKEND = "TRITON_ATTN"
"""It computes in float32, as tokens are compared."""
MEMORY = 0.2
"""Share of a GPU's memory for each engine."""
FLAGS = (f"--attention-backend={BACKEND}", f"--gpu-memory-utilization={MEMORY}")
STEPS = 6
START_S = 300.0
GONE_S = 20.0


@dataclass
class GpuPair(Cluster):
    """flags: of both workers. env: of each role's processes."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def begin(self) -> None:
        """Start everything, the workers one after the other: each looks at the free memory."""
        self.start_servers()
        self.launch("frontend", env=self.env.get("frontend"))
        for role in ("decode", "prefill"):
            self.add(role)

    def add(self, role: str) -> None:
        """One more worker, ready when this returns."""
        self.launch(role, *FLAGS, *self.flags, env=self.env.get(role))
        self.wait_ready(*(w for w in self.workers if w.alive), within_s=START_S)

    def refresh(self, remote_timeout_s: float) -> None:
        """One prefill worker, everything prefilled remotely, nothing left of earlier tests."""
        if not self.of("prefill"):
            self.add("prefill")
        self.set_router(policy="always_remote", remote_timeout_s=remote_timeout_s)
        self.assert_clean()

    @property
    def prefill(self) -> Worker:
        (worker,) = self.of("prefill")
        return worker

    def measure_pace(self, check: Checked, seed: int) -> None:
        """Let the prefill worker compute long prompts, so that its pace is a current one.

        A step in which it was stopped counts as slow. The deadlines of its next jobs may then come
        later than the decode worker goes on without a silent prefill worker."""
        for number in range(8):
            check.ask(random_prompt(2000, seed=seed + 50 + number))

    def kill_prefill_at(self, failpoint: str, plain: Oracle, seed: int) -> None:
        """A request whose prefill worker is killed there is answered well; a new worker starts."""
        victim = self.prefill
        with checked(self, plain, fallbacks={"prefill_lost": 1}) as check:
            victim.arm(failpoint)
            told = check.told(check.ask(random_prompt(1500, seed=seed)))
            assert victim.process.wait(GONE_S) == -signal.SIGKILL
            assert (told["path"], told["fallback"]) == ("local", "prefill_lost")
            self.add("prefill")


@contextmanager
def gpu_pair(
    directory: Path,
    model_path: Path,
    *flags: str,
    env: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[GpuPair]:
    """Started, and stopped at the end."""
    pair = GpuPair(directory, model_path, kv_mib=256, forked=False, flags=flags, env=env or {})
    try:
        pair.begin()
        yield pair
    finally:
        pair.stop()


def plain_engine(model_path: Path) -> Oracle:
    gpu = {"gpu_memory_utilization": MEMORY, "attention_backend": BACKEND}
    return Oracle(model_path, forked=False, **gpu)
