"""A real tcp writer process, stopped or killed at the worst moment. Unlike with shm the receive is
the owner's own: a revoke is proved while the writer is stopped, its blocks are used again at once,
and when it wakes up it is refused and not one of its bytes has landed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.test_transfer_fence import LAYOUT, WRITTEN, foreign, wait_until
from tests.support.transfer_rigs import Region, tcp_rig
from tests.support.transfer_writer import OURS, PATIENCE_S, Writer

Start = Callable[..., Writer]


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    (tmp_path / "fence").mkdir()
    made = tcp_rig(tmp_path / "fence").region(LAYOUT)
    made.data[:] = 0
    yield made
    made.owner.close()


@pytest.fixture
def start(region: Region, tmp_path: Path) -> Iterator[Start]:
    writers: list[Writer] = []

    def make(failpoints: str = "") -> Writer:
        writers.append(Writer(region, tmp_path, failpoints))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("point", ["stream.write.batch", "stream.write.before_batch"])
@pytest.mark.essential
def test_blocks_of_a_stopped_writer_are_free_at_once(
    point: str, region: Region, start: Start
) -> None:
    fences = region.owner.fences
    token = fences.open(range(64))
    writer = start(f"{point}=stop@2")
    writer.send("write", token)
    wait_until(writer.stopped)
    wait_until(lambda: foreign(region) >= 16 << 20)  # the first batch
    wait_until(lambda: fences.try_revoke(token))
    region.data[:] = OURS
    reused = [fences.open(range(64)) for _ in range(64)]  # the same slot is live again
    assert token.slot in {t.slot for t in reused}
    writer.signal(signal.SIGCONT)
    assert writer.line() == "fenced"
    assert foreign(region) == 0
    writer.send("write", token)
    assert writer.line() == "fenced"
    writer.send("write", reused[0])  # the very same process may go on with another grant
    assert writer.line() == "done"
    assert foreign(region) == WRITTEN


def test_writer_killed_inside_a_batch_frees_its_blocks(region: Region, start: Start) -> None:
    fences = region.owner.fences
    token = fences.open(range(64))
    writer = start("stream.write.batch=stop@2")
    writer.send("write", token)
    wait_until(writer.stopped)
    writer.signal(signal.SIGKILL)
    wait_until(lambda: fences.try_revoke(token))
    region.data[:] = OURS
    assert writer.process.wait(PATIENCE_S) == -signal.SIGKILL
    wait_until(lambda: region.owner.connections == 0)  # type: ignore[attr-defined]
    assert foreign(region) == 0


def test_writer_stopped_at_any_moment(region: Region, start: Start) -> None:
    fences, rng = region.owner.fences, random.Random(7)
    writer = start()
    held = 0
    for _ in range(25):
        token = fences.open(range(64))
        writer.send("loop", token)
        wait_until(lambda: foreign(region) > 0)
        time.sleep(rng.random() * 0.02)
        writer.signal(signal.SIGSTOP)
        wait_until(writer.stopped)
        if not fences.try_revoke(token):
            held += 1
            wait_until(lambda token=token: fences.try_revoke(token))
        region.data[:] = OURS
        writer.signal(signal.SIGCONT)
        assert writer.line() == "fenced"
        assert np.all(region.data == OURS)
        region.data[:] = 0
    assert held > 0, "it was never stopped inside a batch: nothing was tested"
    assert fences.in_use == 0


# --------------------------------------------------------------------------- peers that die
