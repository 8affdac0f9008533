"""A real tcp writer process, stopped or killed at the worst moment. Unlike with shm the receive is
the owner's own: a revoke is proved while the writer is stopped, its blocks are used again at once,
and when it wakes up it is refused and not one of its bytes has landed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pullfill.wire import encode
from tests.chaos.test_transfer_fence import (
    LAYOUT,
    OURS,
    PATIENCE_S,
    REPO,
    WRITTEN,
    Writer,
    foreign,
    wait_until,
)
from tests.support.leaks import grown, usage
from tests.support.transfer_rigs import DENSE, Region, Rig, shm_rig, tcp_rig

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
    writer.wait_stopped()
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
    writer.wait_stopped()
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
        writer.wait_stopped()
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

_PEER = """
import sys
import numpy as np
from pathlib import Path
from pullfill.transfer.layout import layout_of
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken, RegionDescriptor, decode
from tests.support.leaks import grown, usage
from tests.support.transfer_rigs import memory_over
descriptor = decode(Path(sys.argv[1]).read_bytes(), RegionDescriptor)
data = np.zeros(descriptor.nbytes, np.uint8)
memory = memory_over(data, layout_of(descriptor))
transport = StreamTransport(TcpKind()) if "tcp" in descriptor.endpoints else ShmTransport()
sessions = [transport.connect(memory, descriptor) for _ in range(100)]
token = FenceToken(slot=int(sys.argv[2]), epoch=int(sys.argv[3]))
print("up", flush=True)
while True:
    for session in sessions:
        session.write_blocks(token, range(40), range(40))
"""


@pytest.mark.long
@pytest.mark.parametrize("make", [shm_rig, tcp_rig])
def test_a_thousand_connects_leave_nothing(make: Callable[[Path], Rig], tmp_path: Path) -> None:
    rig = make(tmp_path)
    region, mine = rig.region(DENSE), rig.local(DENSE)
    token = region.owner.fences.open([0])
    before = usage()
    for _ in range(1000):
        session = rig.connect(mine, region)
        session.write_blocks(token, [0], [0])
        session.close()
    wait_until(lambda: not grown(before))
    assert region.owner.fences.try_revoke(token)
    region.owner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("make", [shm_rig, tcp_rig])
def test_a_thousand_dead_connections_leave_nothing(
    make: Callable[[Path], Rig], tmp_path: Path
) -> None:
    """Ten processes with a hundred sessions each, killed while they write."""
    (tmp_path / "shm").mkdir()
    region = make(tmp_path / "shm").region(DENSE)
    fences = region.owner.fences
    path = tmp_path / "descriptor.bin"
    path.write_bytes(encode(region.descriptor))
    before = usage()
    for _ in range(10):
        token = fences.open(range(40))
        peer = subprocess.Popen(
            [sys.executable, "-c", _PEER, str(path), str(token.slot), str(token.epoch)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert peer.stdout is not None
        assert peer.stdout.readline() == "up\n"
        peer.kill()
        peer.wait(PATIENCE_S)
        peer.stdout.close()
        wait_until(lambda token=token: fences.try_revoke(token))
    wait_until(lambda: not grown(before))
    assert fences.in_use == 0
    region.owner.close()
