"""`make spine`: records one remote prefill in a real cluster, and prints its path.

Which functions of pullfill run, in which file, process and thread, in the order of their first
call. A function that also runs while the cluster is idle is no part of the path. The budgets are
what `tests/integration/test_spine.py` checks: they may only fall.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.checkpoint import tiny_checkpoint
from tests.support.cluster import Cluster, until
from tests.support.prompts import ask, going_away, random_prompt
from tests.support.recorder import RECORD, Call, Window, path_of, read

IDLE = 1
IDLE_S = 12.0
"""Longer than every regular task of a worker takes to come by again."""


def plain(cluster: Cluster) -> None:
    """A prompt of one chunk, nothing cached."""
    ask(cluster, random_prompt(400, seed=91))


def hit(cluster: Cluster) -> None:
    """A prompt whose beginning the decode worker has cached, and the prefill worker has not."""
    ask(cluster, [*random_prompt(320, seed=90), *random_prompt(300, seed=92)])


def chunks(cluster: Cluster) -> None:
    """A prompt of four chunks."""
    ask(cluster, random_prompt(2000, seed=93))


def cancel(cluster: Cluster) -> None:
    """A client that goes away while its prompt is computed remotely."""
    (prefill,) = cluster.of("prefill")
    prefill.arm("prefill.before_write=sleep:0.3")
    with going_away(cluster, random_prompt(1500, seed=94)):
        until(lambda: cluster.load_of(prefill)["jobs"], 10, "the job is there")
    cluster.assert_clean()
    prefill.arm("")


def killed(cluster: Cluster) -> None:
    """A prefill worker that is killed while it writes."""
    (prefill,) = cluster.of("prefill")
    prefill.arm("shm.write.batch=kill@2")
    ask(cluster, random_prompt(1500, seed=95))


CASES: dict[str, Callable[[Cluster], None]] = {
    case.__name__: case for case in (plain, hit, chunks, cancel, killed)
}
# Two runs differ by a few functions: a regular task may come by in one and not in the other.
FILES, FUNCTIONS = 90, 512
"""The budget of the case `plain` over shm."""


@contextmanager
def recorded(directory: Path, *flags: str) -> Iterator[tuple[Cluster, Path, Window]]:
    """A cluster whose processes record."""
    record = directory / "calls"
    record.touch()
    window = Window(record)
    cluster = Cluster(directory, tiny_checkpoint())
    try:
        cluster.start_servers()
        for role in ("decode", "prefill", "frontend"):
            cluster.launch(role, *(flags if role != "frontend" else ()), env={RECORD: str(record)})
        cluster.wait_ready(*cluster.workers)
        # Everything that happens once has then happened: connections, self-check, first measures.
        cluster.set_router(policy="always_local")
        ask(cluster, random_prompt(320, seed=90))
        cluster.set_router(policy="always_remote")
        for seed in range(80, 84):
            ask(cluster, random_prompt(700, seed=seed))
        cluster.assert_clean()
        yield cluster, record, window
    finally:
        cluster.stop()


def record_cases(directory: Path, names: Sequence[str], *flags: str) -> dict[str, list[Call]]:
    """The path of each case."""
    with recorded(directory, *flags) as (cluster, record, window):
        window.open(IDLE)
        time.sleep(IDLE_S)
        for number, name in enumerate(names, IDLE + 1):
            window.open(number)
            CASES[name](cluster)
            time.sleep(0.3)  # the ack and what is told afterwards
            window.open(0)
        calls = read(record)
        return {name: path_of(calls, number, IDLE) for number, name in enumerate(names, IDLE + 1)}


def sizes(path: Sequence[Call]) -> tuple[int, int]:
    """The number of files and of functions."""
    return len({c.file for c in path}), len({(c.file, c.function) for c in path})


def shown(path: Sequence[Call]) -> Iterator[str]:
    """The path by hops: each line is one function, under the process and thread it runs in."""
    for (role, thread), hop in itertools.groupby(path, key=lambda c: (c.role, c.thread)):
        yield f"{role} / {thread}"
        yield from (f"    {c.file} {c.function}" for c in hop)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make spine", description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--transports", default="shm", help="shm (default) or tcp")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pullfill-spine-") as directory:
        names = chosen.case or list(CASES)
        found = record_cases(Path(directory), names, f"--transports={chosen.transports}")
    for name, path in found.items():
        print(f"\n# {name}: {CASES[name].__doc__}")
        print("\n".join(shown(path)))
    for name, path in found.items():
        print(f"{name}: {sizes(path)[0]} files, {sizes(path)[1]} functions")


if __name__ == "__main__":
    main()
