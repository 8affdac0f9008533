"""A real writer process, stopped at the worst moment: not one foreign byte may land
after the owner's revoke was proved (faults 2, 5 and 10 at the level of the transport).

Over shm the writer copies, and holds a lock meanwhile. Over tcp the owner receives itself: a revoke
is proved while the writer is stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pullfill.transfer.contract import KvLayout
from pullfill.transfer.shm.files import sweep
from tests.support.transfer_rigs import Region, shm_rig, tcp_rig
from tests.support.transfer_writer import FOREIGN, OURS, PATIENCE_S, Writer
from tests.support.waiting import eventually

REPO = Path(__file__).parents[2]
APART = (8 << 10) + 512
LAYOUT = KvLayout(
    0, 4, 64, 16, 8 << 10, layer_stride=64 * 16 * APART, block_stride=16 * APART, head_stride=APART
)
"""4096 runs that do not merge: four batches of `BATCH_RUNS`."""
WRITTEN = LAYOUT.num_blocks * LAYOUT.block_bytes
"""Bytes of one write, 32 MiB; the rest of the region is padding."""


Start = Callable[..., Writer]


@pytest.fixture
def region(rig: Callable[..., Any], tmp_path: Path) -> Iterator[Region]:
    (tmp_path / "region").mkdir()
    made: Region = rig(tmp_path / "region").region(LAYOUT)
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


def foreign(region: Region) -> int:
    return int((region.data == FOREIGN).sum())


@pytest.mark.parametrize("point", ["stream.write.batch", "stream.write.before_batch"])
@pytest.mark.parametrize("rig", [tcp_rig])
@pytest.mark.essential
def test_blocks_of_a_stopped_writer_are_free_at_once(
    point: str, region: Region, start: Start
) -> None:
    fences = region.owner.fences
    token = fences.open(range(64))
    writer = start(f"{point}=stop@2")
    writer.tell("write", token)
    eventually(writer.stopped)
    eventually(lambda: foreign(region) >= 16 << 20)  # the first batch
    eventually(lambda: fences.try_revoke(token))
    region.data[:] = OURS
    reused = [fences.open(range(64)) for _ in range(64)]  # the same slot is live again
    assert token.slot in {t.slot for t in reused}
    writer.process.send_signal(signal.SIGCONT)
    assert writer.answer() == "fenced"
    assert foreign(region) == 0
    writer.tell("write", token)
    assert writer.answer() == "fenced"
    writer.tell("write", reused[0])  # the very same process may go on with another grant
    assert writer.answer() == "done"
    assert foreign(region) == WRITTEN


@pytest.mark.parametrize("rig", [shm_rig, tcp_rig])
@pytest.mark.essential
def test_writer_stopped_at_any_moment(rig: Any, region: Region, start: Start) -> None:
    fences, rng = region.owner.fences, random.Random(7)
    writer = start()
    held = 0
    for _ in range(15):
        token = fences.open(range(64))
        writer.tell("loop", token)
        eventually(lambda: foreign(region) > 0)
        time.sleep(rng.random() * 0.02)
        writer.process.send_signal(signal.SIGSTOP)
        eventually(writer.stopped)
        if not fences.try_revoke(token):
            held += 1
            if rig is shm_rig:
                writer.process.send_signal(signal.SIGCONT)
            eventually(lambda token=token: fences.try_revoke(token))
        region.data[:] = OURS
        writer.process.send_signal(signal.SIGCONT)
        assert writer.answer() == "fenced"
        assert np.all(region.data == OURS)
        region.data[:] = 0
    assert held > 0, "it was never stopped inside a batch: nothing was tested"
    assert fences.in_use == 0


@pytest.mark.essential
def test_files_of_a_killed_owner_are_swept(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from pullfill.transfer.shm.files import RegionFiles, create_kv\n"
        "files = RegionFiles('decode-dead', Path(sys.argv[1]))\n"
        "for rank in (0, 1): create_kv(files.directory, 'decode-dead', rank, 4096)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "up\n"
        names = {f"pullfill-decode-dead{end}" for end in (".fence", "-0.kv", "-1.kv")}
        assert sweep(tmp_path) == []
        assert set(os.listdir(tmp_path)) == names
    finally:
        owner.kill()
        owner.wait(PATIENCE_S)
        owner.stdout.close()
    assert set(sweep(tmp_path)) == names
    assert os.listdir(tmp_path) == []
