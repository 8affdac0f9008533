"""`make spine`: records one remote prefill in a real cluster, and prints its path.

Which functions of pullfill run, in which file, process and thread, in the order of their first
call. Each case is asked for twice. A function that runs only once, or that also runs while the
cluster is idle, is a regular task that came by, and no part of the path. Two counts:

- all: every function, also properties, closures and methods of one line
- hops: functions that call one of another file. Whoever reads these follows the request from file
  to file. What calls only its own file is a detail of it. ASIDE is not counted

`tests/integration/test_spine.py` checks both counts, which may only fall, and that the path is the
one in docs/architecture.md.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

from tests.support.checkpoint import tiny_checkpoint
from tests.support.cluster import Cluster
from tests.support.prompts import ask, random_prompt
from tests.support.recorder import RECORD, Call, read, window_of

TURNS = 0, 1
"""Of each case."""
IDLE = 1
IDLE_S = 4.0
"""Longer than every regular task of a worker takes to come by again, but one: the ledger's timer
wakes up after 10 s and calls six functions that then count as part of the path."""


def plain(cluster: Cluster, turn: int) -> None:
    """A prompt of one chunk, nothing cached."""
    ask(cluster, random_prompt(400, seed=100 + turn))


def hit(cluster: Cluster, turn: int) -> None:
    """A prompt whose beginning the decode worker has cached, and the prefill worker has not."""
    ask(cluster, [*random_prompt(320, seed=90 + turn), *random_prompt(300, seed=200 + turn)])


CASES: dict[str, Callable[[Cluster, int], None]] = {case.__name__: case for case in (plain, hit)}
FILES, FUNCTIONS = 84, 460
"""The budget of the case `plain` over shm: all."""
HOP_FILES, HOPS = 32, 99
"""The same for hops."""
ASIDE = (
    "pullfill/runtime/", "pullfill/prefix/", "pullfill/rate.py", "pullfill/engine/kv_events.py",
    "frontend/request_log.py", "frontend/routing/prefixes.py", "decode_worker/request_trace.py",
    "decode_worker/prefix/block_events.py", "decode_worker/demand.py", "decode_worker/cost.py",
    "decode_worker/meter.py", "pullfill/worker/step_meter.py",
)  # fmt: skip
"""What only looks on: logs, metrics, traces, records, measurements, and who has cached what. No
step of a request needs it."""

ROOT = Path(__file__).resolve().parents[1]
_ROW = re.compile(r"^\| (\d+) \| \*\*([\w ]+)\.\*\* .*? \| ([^|]+) \| [^|]+ \|$", re.M)
_FUNCTION = re.compile(r"\[`([\w/]+\.py)`\]\(\.\./\1\) `(\w+)`")


@contextmanager
def recorded(directory: Path, *flags: str) -> Iterator[tuple[Cluster, Path, mmap]]:
    """A cluster whose processes record."""
    record = directory / "calls"
    record.touch()
    window = window_of(record)
    with Cluster(directory, tiny_checkpoint()) as cluster:
        cluster.start_servers()
        for role in ("decode", "prefill", "frontend"):
            cluster.launch(role, *(flags if role != "frontend" else ()), env={RECORD: str(record)})
        cluster.wait_ready(*cluster.workers)
        # Everything that happens once has then happened: connections, self-check, first measures.
        cluster.set_router(policy="always_local")
        for turn in TURNS:
            ask(cluster, random_prompt(320, seed=90 + turn))
        cluster.set_router(policy="always_remote")
        for seed in range(80, 84):
            ask(cluster, random_prompt(700, seed=seed))
        cluster.assert_clean()
        time.sleep(0.5)  # the last step, which tells vLLM's workers of the end
        yield cluster, record, window


def record_cases(directory: Path, names: Sequence[str], *flags: str) -> dict[str, list[Call]]:
    """The calls of each case that both of its requests make, as the first one made them.

    Under the name `idle` those without a request."""
    windows = {name: [2 * i + turn for turn in TURNS] for i, name in enumerate(names, IDLE)}
    with recorded(directory, *flags) as (cluster, record, window):
        window[0] = IDLE
        time.sleep(IDLE_S)
        for name, pair in windows.items():
            for turn in TURNS:
                window[0] = pair[turn]
                CASES[name](cluster, turn)
                time.sleep(0.3)  # the ack and what is told afterwards
                window[0] = 0
        calls = read(record)
    made: dict[int, dict[tuple[str, str, str], Call]] = {}
    for call in calls:
        key = call.role, call.file, call.function
        made.setdefault(call.window, {}).setdefault(key, call)
    found = {
        name: [c for k, c in made[a].items() if k in made[b]] for name, (a, b) in windows.items()
    }
    return {"idle": [c for c in calls if c.window == IDLE], **found}


def path_of(calls: Sequence[Call], idle: Sequence[Call]) -> list[Call]:
    """The calls of a case, without the functions that the same role also calls when idle."""
    quiet = {(c.role, c.file, c.function) for c in idle}
    return [c for c in calls if (c.role, c.file, c.function) not in quiet]


def hops(path: Sequence[Call]) -> list[tuple[str, str]]:
    """The functions of the path that call one of another file."""
    on_path = {(c.file, c.function) for c in path if not c.file.startswith(ASIDE)}
    ahead = {
        (c.caller_file, c.caller)
        for c in path
        if c.file != c.caller_file and not c.file.startswith(ASIDE)
    }
    return sorted(on_path & ahead)


def sizes(path: Sequence[Call]) -> tuple[int, int, int, int]:
    """The number of files and of functions, of all and of hops."""
    every = {(c.file, c.function) for c in path}
    found = hops(path)
    return len({f for f, _ in every}), len(every), len({f for f, _ in found}), len(found)


def not_as_told(page: str, calls: Sequence[Call], idle: Sequence[Call]) -> list[str]:
    """What the table of the page says that was not recorded, or not in this order.

    A function that also runs while the cluster is idle has no place in the order."""
    rows = [(int(n), title, _FUNCTION.findall(where)) for n, title, where in _ROW.findall(page)]
    found = [] if [n for n, *_ in rows] == list(range(1, 10)) else ["not the steps 1 to 9"]
    first: dict[tuple[str, str], float] = {}
    for call in calls:
        first.setdefault((call.file, call.function.split(".")[-1]), call.at)
    quiet = {(c.file, c.function.split(".")[-1]) for c in idle}
    ended = 0.0
    for number, title, places in rows:
        if not places:
            found.append(f"step {number}, {title}: names no function")
        found += [f"step {number}: {place} did not run" for place in places if place not in first]
        times = [first[place] for place in places if place in first and place not in quiet]
        if times:
            # A step may begin within the one above it. The last of its functions comes later.
            if max(times) < ended:
                found.append(f"step {number}, {title}: was over before the step above it")
            ended = max(ended, *times)
    return found


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
    paths = {name: path_of(found[name], found["idle"]) for name in names}
    for name, path in paths.items():
        print(f"\n# {name}: {CASES[name].__doc__}")
        print("\n".join(shown(path)))
        print(f"\n# {name}: hops")
        print("\n".join(f"    {file} {function}" for file, function in hops(path)))
    for name, path in paths.items():
        files, functions, hop_files, count = sizes(path)
        print(
            f"{name}: {functions} functions in {files} files run. "
            f"{count} functions in {hop_files} files hand the request on to another file"
        )
    if "hit" in found:  # the case that takes all steps
        page = (ROOT / "docs" / "architecture.md").read_text()
        print(*not_as_told(page, found["hit"], found["idle"]), sep="\n")


if __name__ == "__main__":
    main()
