"""From SIGKILL in the middle of a write until the blocks are free, many times over.

One real decode worker with its engine under load; its prefill workers are `chaos_writer`s, which
write rubbish until they die. One at a time joins, gets a job, and is killed at a random moment; all
jobs it was given, and all that wait, are then served locally. So the answers of the load, compared
with the plain engine's, also show that no byte of an unfinished write was ever used.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_cluster import ChaosCluster, Freed, cluster_in
from benchmarks.chaos_load import Ask, Load, Work
from benchmarks.live import BenchError
from tests.support.checkpoint import tiny_checkpoint

AHEAD = 3
"""Writers started before they are needed."""
LATEST_S = 0.06
"""A writer is killed at most this long after its first bytes landed."""


@dataclass(slots=True)
class Released:
    """noticed_s, free_s: seconds from each kill (see `Freed`)."""

    noticed_s: list[float] = field(default_factory=list)
    free_s: list[float] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    wrong: list[Ask] = field(default_factory=list)
    left: str = ""


class _Writer:
    """One child; `kill` reaps it."""

    def __init__(self, cluster: ChaosCluster, name: str, log: Path) -> None:
        self.name = name
        where = [cluster.etcd.url, cluster.nats.url, cluster.namespace, name]
        with log.open("ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.chaos_writer", *where],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )

    def expect(self, word: str) -> None:
        assert self._process.stdout is not None
        if (line := self._process.stdout.readline().strip()) != word:
            raise BenchError(f"{self.name} said {line!r} instead of {word!r}")

    def go(self) -> None:
        self.expect("ready")
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def _writers(cluster: ChaosCluster, count: int, log: Path) -> Iterator[Iterator[_Writer]]:
    """`count` writers one after the other, a few of them starting ahead of their turn."""
    waiting: list[_Writer] = []

    def turns() -> Iterator[_Writer]:
        for number in range(count + AHEAD):
            if number < count:
                waiting.append(_Writer(cluster, f"writer-{number}", log))
            if number >= AHEAD:
                writer = waiting.pop(0)
                try:
                    yield writer
                finally:
                    writer.close()

    try:
        yield turns()
    finally:
        for writer in waiting:
            writer.close()


def measure(work: Work, count: int, base: Path, clients: int = 8) -> Released:
    """Kill `count` writers. Raises BenchError when one gets nothing to do."""
    seen, rng = Released(), random.Random(count)
    with cluster_in(base / "release", tiny_checkpoint(), decode=1, prefill=0, frontends=1) as it:
        it.set_router(policy="always_remote")
        (probe,) = it.probes("decode").items()
        with Load(work, it.urls, clients=clients, each=None, seed=3) as load:
            with _writers(it, count, base / "release" / "writers.log") as writers:
                for writer in writers:
                    writer.go()
                    writer.expect("writing")
                    watch = Freed(dict([probe]), writer.name, alone=True)
                    watch.ready()
                    time.sleep(rng.uniform(0, LATEST_S))
                    killed = time.monotonic()
                    writer.kill()
                    watch.wait()
                    seen.noticed_s.append(_since(killed, watch.noticed))
                    seen.free_s.append(_since(killed, watch.freed))
            load.stop()
        seen.asks, seen.wrong = load.ended, work.wrong(load.ended)
        try:
            it.assert_clean()
        except AssertionError as exc:
            seen.left = str(exc)
    return seen


def _since(killed: float, moment: float | None) -> float:
    return Freed.LIMIT_S if moment is None else moment - killed
