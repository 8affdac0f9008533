"""Processes of ranks: they end with the main process and never without it noticing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pullfill.config import ranks_of
from pullfill.engine import environment

REPO = Path(__file__).resolve().parents[3]
PATIENCE_S = 20.0
MAIN = """
import multiprocessing, signal, sys, time
from pullfill.engine.environment import bind_to_parent

def rank(pipe):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    bind_to_parent()
    pipe.send(1)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    there, here = context.Pipe()
    child = context.Process(target=rank, args=(here,), daemon=True)
    child.start()
    there.recv()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Dead, if perhaps not yet buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def main_process(tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "main.py"
    script.write_text(MAIN)
    env = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env
    )


def test_a_rank_ignores_signals_of_the_group_and_dies_with_the_main_process(
    main_process: subprocess.Popen[str],
) -> None:
    with main_process:
        assert main_process.stdout is not None
        pid = int(main_process.stdout.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        # Still there once it has certainly been delivered: the kernel lists nothing as pending.
        pending = [line for line in _status(pid) if line.startswith(("SigPnd", "ShdPnd"))]
        assert all(int(line.split()[1], 16) == 0 for line in pending)
        assert not gone(pid)
        main_process.kill()
        main_process.wait()
        end = time.monotonic() + PATIENCE_S
        while not gone(pid):
            assert time.monotonic() < end, "it outlived the main process"
            time.sleep(0.005)


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


def test_the_main_process_binds_itself_to_nobody() -> None:
    before = signal.getsignal(signal.SIGTERM)
    environment.bind_to_parent()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["-tp", "2", "--enforce-eager", "-pp=3"], 6),
        (["--tensor_parallel_size=4", "--max-model-len", "8"], 4),
        (["--tensor-parallel-size"], 1),
        (["--tensor-parallel-size", "x"], 1),
        (["--max-num-seqs", "-tp", "0"], 1),
        (["-tp", "2", "-pp", "2", "--tensor-parallel-size=4"], 8),
    ],
)
def test_ranks_are_counted_from_the_flags(flags: list[str], count: int) -> None:
    assert ranks_of(flags) == count


def test_ranks_share_the_cores_and_are_not_pinned_to_one() -> None:
    code = (
        "import os; from pullfill.engine import environment\n"
        "cores = len(os.sched_getaffinity(0))\n"
        "environment.prepare(cpu=0, model='x', ranks=2)\n"
        "assert len(os.sched_getaffinity(0)) == cores\n"
        "assert os.environ['OMP_NUM_THREADS'] == str(max(1, cores // 2))"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, check=True)
