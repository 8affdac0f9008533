"""The nccl transport from a session to its owner: when communicators come and go, what is staged,
who can reach whom. NCCL and the GPUs are of plain memory. Faults: test_transfer_nccl_faults.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pullfill.errors import ConfigError, PeerUnavailable
from pullfill.transfer.nccl.gpu_turns import TURNS
from pullfill.transfer.nccl.nccl_backend import PEER, CudaGpus, NcclKind
from tests.support.fake_nccl import World
from tests.support.nccl_gpus import FakeGpus
from tests.support.nccl_places import Make, Writing, places
from tests.support.transfer_rigs import DENSE, stream_rig
from tests.support.waiting import eventually


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with places(tmp_path) as build:
        yield build


# ---------------------------------------------------------------------- communicators come and go


def test_no_communicator_before_the_first_batch_and_one_for_all_later_ones(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    assert place.world.constructed == 0
    for first in range(0, 40, 10):
        session.write_blocks(token, range(first, first + 10), range(first, first + 10))
    session.read_blocks(token, [3], [3])
    assert place.world.constructed == 2
    assert place.moved(range(40))
    session.close()
    eventually(lambda: not place.world.comms, "not given up with the connection")


@pytest.mark.parametrize(("layout", "staged"), [("dense", False), ("padded-heads", True)])
def test_only_what_is_not_contiguous_is_staged(make: Make, layout: str, staged: bool) -> None:
    """24 blocks of a layer are three messages here; the owner's heads lie apart or not."""
    place = make(layout=layout)
    session, token = place.connect(), place.token()
    session.write_blocks(token, range(24), range(24))
    assert (place.kind.gpus.gpu.copies > 0) == staged
    assert place.world.sizes == [8 << 10] * 9
    assert place.moved(range(24))
    session.close()


def test_few_kernels_wait_on_a_gpu_however_many_peers_there_are(make: Make) -> None:
    place = make()
    token = place.token()
    others = [place.rig.local(DENSE, seed=n) for n in range(2 * TURNS)]
    sessions = [place.rig.connect(other, place.region) for other in others]
    for session in sessions:
        session.write_blocks(token, [0], [0])
    place.world.set(hang=True)
    writers = [Writing(session, token, range(40)) for session in sessions]
    eventually(lambda: place.world.waiting("GPU-0") == TURNS, "the kernels do not begin")
    time.sleep(0.05)
    assert place.world.most_waiting == TURNS
    place.world.set(hang=False)
    assert [writer.end() for writer in writers] == [None] * len(writers)
    assert place.world.most_waiting == TURNS
    for session in sessions:
        session.close()


def test_a_worker_that_is_both_receives_while_its_own_writes_wait(make: Make) -> None:
    """Otherwise workers with this role could all wait for each other's turns."""
    place = make()
    session, token = place.connect(), place.token()
    turns = place.kind.gpus.device.turns[PEER]
    turns.make(place.kind.batch_bytes)
    with ExitStack() as taken:
        for _ in range(TURNS):
            taken.enter_context(turns.take(lambda: None))
        session.write_blocks(token, range(40), range(40))
    assert place.moved(range(40))
    session.close()


# ---------------------------------------------------------------------- who can reach whom


def test_both_on_one_gpu_is_refused_where_nccl_cannot(tmp_path: Path) -> None:
    kind = NcclKind(FakeGpus(World()))
    rig = stream_rig(tmp_path, kind)
    region, mine = rig.region(DENSE), rig.local(DENSE)
    with pytest.raises(PeerUnavailable, match="same GPU"):
        rig.connect(mine, region)
    reason = rig.transport.can_reach(region.descriptor)
    region.owner.close()
    assert reason is not None
    assert "NCCL_MULTI_RANK_GPU_ENABLE" in reason


@pytest.mark.parametrize(
    ("detail", "why"),
    [
        ("23203/GPU-1/0", None),
        ("23201/GPU-1/0", None),
        ("23203/GPU-0/1", "same GPU"),
        ("22903/GPU-1/0", "it has NCCL 2.29.3, we have 2.32.3"),
        ("", "no version"),
        ("x/GPU-1/0", "no version"),
        ("9" * 5000, "no version"),
    ],
)
def test_can_reach_says_why_not(detail: str, why: str | None) -> None:
    reason = NcclKind(FakeGpus(World(), "GPU-0")).can_reach(detail)
    assert (reason is None) == (why is None)
    assert why is None or why in str(reason)


def test_without_a_gpu_the_reason_is_one_sentence_and_nothing_is_imported() -> None:
    kind = NcclKind(CudaGpus())
    reason = kind.why_not()
    if reason is None:
        pytest.skip("this machine has a CUDA device and NCCL")
    assert "CUDA" in reason or "NCCL" in reason
    assert "\n" not in reason


def test_memory_of_the_cpu_is_not_offered(make: Make) -> None:
    place = make()
    kind = NcclKind(CudaGpus())
    assert place.mine.memory.device is None
    assert kind.detail(place.mine.memory) is None
    with pytest.raises(ConfigError, match="GPU memory"):
        kind.make(place.mine.memory, owner=True)
