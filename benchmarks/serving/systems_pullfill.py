"""pullfill as a user starts it: `pullfill up` with a checkpoint, then `pullfill config set`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.live import CLI, BenchError, running, wait_for
from benchmarks.serving import model
from benchmarks.serving.contract import Kind, Running

LINK_LIMIT_S = 60.0


@contextmanager
def cluster(
    name: str, policy: str, decode: int, prefill: int, flags: Sequence[str], base: Path
) -> Iterator[Running]:
    """A cluster with so many workers and that router policy. Raises BenchError."""
    workers = ["--decode", str(decode), "--prefill", str(prefill)]
    state = base / "cluster"
    with running(state, "--model", str(model.model_directory()), *workers, *flags) as live:
        wait_for(
            lambda: len(live.linked()) == prefill,
            LINK_LIMIT_S,
            f"{name}: every prefill worker is connected to every decode worker",
        )
        set_router(state, "policy", policy)
        yield Running(
            name=name,
            urls=dict.fromkeys(Kind, live.url),
            model=model.NAME,
            pids=live.pids(),
            ready_s=live.ready_s,
            logs=state / "logs",
        )


def set_router(state: Path, key: str, value: str) -> None:
    """`pullfill config set router.KEY VALUE`. Raises BenchError with what it printed."""
    done = subprocess.run(
        [*CLI, "config", "set", f"router.{key}", value, "--state-dir", str(state)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
    )
    if done.returncode:
        raise BenchError(f"router.{key} = {value}: {done.stdout[-500:]}{done.stderr[-500:]}")
