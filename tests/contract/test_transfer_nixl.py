"""What the nixl backend promises beyond the conformance suite: a worker is not disturbed by it,
agents come and go, a writer that is stopped or killed holds nothing. Needs `make install-nixl`."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from pullfill.errors import BadMessage, TransferFailed
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.nixl import agent as nixl
from pullfill.transfer.nixl.agent import Agent
from pullfill.transfer.nixl.nixl_backend import NixlKind, NixlRuns, _checked
from tests.support.transfer_rigs import DENSE, Region, Rig, stream_rig
from tests.support.transfer_writer import FOREIGN, OURS, Writer
from tests.support.waiting import eventually

REPO = Path(__file__).parents[2]

needs_nixl = pytest.mark.skipif(
    util.find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    before = set(threading.enumerate())
    (tmp_path / "shm").mkdir()
    made = stream_rig(tmp_path / "shm", NixlKind())
    yield made
    made.close()
    eventually(lambda: set(threading.enumerate()) <= before, "a thread is left")


@needs_nixl
def test_a_worker_keeps_its_cores_and_its_idle_time(tmp_path: Path) -> None:
    """In a process of its own: pins itself, moves a batch, then looks at all of its threads."""
    program = """
import os, sys, threading, time
from pathlib import Path
core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})
other = threading.Event()
threading.Thread(target=other.wait).start()
from tests.contract.test_transfer_nixl import NixlKind, stream_rig, DENSE
rig = stream_rig(Path(sys.argv[1]), NixlKind())
region, mine = rig.region(DENSE), rig.local(DENSE)
session, token = rig.connect(mine, region), region.owner.fences.open(range(40))
session.move("write", token, range(40), range(40))
tasks = os.listdir("/proc/self/task")
assert {tuple(os.sched_getaffinity(int(t))) for t in tasks} == {(core,)}, "moved to other cores"
spent, started = time.process_time(), time.monotonic()
time.sleep(0.3)
busy = (time.process_time() - spent) / (time.monotonic() - started)
assert busy < 0.3, f"{busy:.0%} of a core while idle"
session.close()
region.owner.close()
other.set()
print("fine")
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.strip().endswith("fine"), result.stdout + result.stderr


def foreign(region: Region) -> int:
    return int((region.data == FOREIGN).sum())


@needs_nixl
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.essential
def test_a_writer_stopped_or_killed_anywhere_leaves_not_one_byte_after_the_proof(
    rig: Rig, tmp_path: Path, number: signal.Signals
) -> None:
    big = rig.region(dense_layout(4, 64, 1, 128 << 10))
    big.data[:] = 0
    fences = big.owner.fences
    chance = random.Random(5)
    for _ in range(2):
        token = fences.open(range(64))
        with Writer(big, tmp_path) as writer:
            writer.tell("loop", token)
            eventually(lambda: foreign(big) > 0, "nothing arrives")
            time.sleep(chance.random() * 0.02)
            writer.process.send_signal(number)
            eventually(lambda t=token: fences.try_revoke(t), "never proved")
            big.data[:] = OURS
            if number is signal.SIGSTOP:
                writer.process.send_signal(signal.SIGCONT)
                assert writer.answer() == "fenced"
            assert foreign(big) == 0
        big.data[:] = 0


def test_without_the_package_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl.why_not.cache_clear()
    monkeypatch.setattr(nixl.importlib.util, "find_spec", lambda name: None)
    try:
        assert NixlKind().why_not() == "the nixl package is not installed (make install-nixl)"
    finally:
        nixl.why_not.cache_clear()


def test_another_version_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "version", lambda: "1.5.1")
    kind = NixlKind()
    assert kind.can_reach("1.5.1") is None
    assert kind.can_reach("1.4.0") == "it has NIXL 1.4.0, we have 1.5.1"
    assert "no version" in str(kind.can_reach(""))


@pytest.mark.parametrize(
    "iovec",
    [b"", b"x" * 15, np.array([[1, 99]], "<u8").tobytes(), np.array([[1, 0], [1, 100]], "<u8"),
     np.array([[1, 2**63], [1, 2**63 + 100]], "<u8")],
)  # fmt: skip
def test_run_lists_that_do_not_fit_the_batch_are_refused(iovec: bytes | np.ndarray) -> None:
    said = NixlRuns(generation=1, iovec=bytes(iovec))
    with pytest.raises(BadMessage):
        _checked(said, 100)


@needs_nixl
def test_bad_metadata_is_a_failure_like_any_other(rig: Rig) -> None:
    agent = Agent(rig.region(DENSE).memory)
    with pytest.raises(TransferFailed):
        agent.connect(b"not NIXL's")
    agent.close()
    agent.close()
