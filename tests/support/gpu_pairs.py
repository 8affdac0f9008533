"""A decode and a prefill worker with real vLLM on GPUs, and one plain engine to compare with.

Workers are started, not forked: CUDA does not survive a fork.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cluster import Cluster, Worker
from tests.support.oracle import Oracle

BACKEND = "TRITON_ATTN"
"""It computes in float32, as tokens are compared."""
MEMORY = 0.2
"""Share of a GPU's memory for each engine."""
FLAGS = (f"--attention-backend={BACKEND}", f"--gpu-memory-utilization={MEMORY}")
STEPS = 6
START_S = 300.0


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

    @property
    def prefill(self) -> Worker:
        (worker,) = self.of("prefill")
        return worker


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
