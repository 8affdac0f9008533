"""The nccl transport from a session to its owner: when communicators come and go, what is staged,
who can reach whom; and what ends when it goes wrong. NCCL and the GPUs are of plain memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pullfill.errors import Fenced, TransferFailed
from pullfill.transfer.contract import Direction, PeerSession
from pullfill.transfer.nccl.gpu_turns import TURNS, Laid, Turn
from pullfill.transfer.nccl.nccl_backend import PEER
from pullfill.transfer.runs import size_of, stream_of
from pullfill.wire import FenceToken
from tests.support.fake_nccl import World
from tests.support.nccl_rig import FakeKind, PairKind, clean_world
from tests.support.transfer_rigs import DENSE, LAYOUTS, Local, Region, Rig, stream_rig
from tests.support.waiting import Call, eventually


@dataclass
class Place:
    """A region, a peer's memory, and the world between them."""

    world: World
    kind: PairKind
    rig: Rig
    region: Region
    mine: Local

    def connect(self) -> PeerSession:
        return self.rig.connect(self.mine, self.region)

    def token(self) -> FenceToken:
        return self.region.owner.fences.open(range(40))

    def moved(self, blocks: range) -> bool:
        return bool((self.region.pages[:, blocks] == self.mine.pages[:, blocks]).all())


Make = Callable[..., Place]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes places. At the end each closes, and no communicator, stream or thread is left."""
    with ExitStack() as made:

        def build(*, layout: str = "dense", local: str = "dense") -> Place:
            world = made.enter_context(clean_world())
            kind = PairKind(world, message_bytes=8 << 10, batch_bytes=64 << 10)
            rig = stream_rig(tmp_path, kind)
            place = Place(world, kind, rig, rig.region(LAYOUTS[layout]), rig.local(LAYOUTS[local]))
            made.callback(rig.close)
            made.callback(world.set, hang_init=False, hang_issue=False, dumb_streams=0)
            return place

        yield build


def writing(session: PeerSession, token: FenceToken, blocks: range) -> Call:
    return Call(session.move, "write", token, blocks, blocks)


def hanging(
    place: Place, session: PeerSession, token: FenceToken, *, launched: bool = True
) -> Call:
    """A write whose kernels never end, both sides inside. Or its groups are never launched."""
    world = place.world
    if launched:
        session.move("write", token, range(1), range(1))
    world.set(**({"hang": True} if launched else {"hang_issue": True}))
    call = writing(session, token, range(1, 40))

    def inside() -> bool:
        if launched:
            return world.waiting("GPU-0") == world.waiting("GPU-1") == 1
        return sum(comm.doing == "issue" for comm in world.comms.values()) == 2

    eventually(inside, "it does not begin")
    return call


# ---------------------------------------------------------------------- communicators come and go


@pytest.mark.parametrize(("layout", "staged"), [("dense", False), ("padded-heads", True)])
def test_only_what_is_not_contiguous_is_staged(make: Make, layout: str, staged: bool) -> None:
    """24 blocks of a layer are three messages here; the owner's heads lie apart or not."""
    place = make(layout=layout)
    session, token = place.connect(), place.token()
    session.move("write", token, range(24), range(24))
    assert (place.kind.gpu.copies > 0) == staged
    assert place.world.sizes == [8 << 10] * 9
    assert place.moved(range(24))


def test_few_kernels_wait_on_a_gpu_however_many_peers_there_are(make: Make) -> None:
    place = make()
    token = place.token()
    others = [place.rig.local(DENSE, seed=n) for n in range(2 * TURNS)]
    sessions = [place.rig.connect(other, place.region) for other in others]
    for session in sessions:
        session.move("write", token, [0], [0])
    place.world.set(hang=True)
    writers = [writing(session, token, range(40)) for session in sessions]
    eventually(lambda: place.world.waiting("GPU-0") == TURNS, "the kernels do not begin")
    time.sleep(0.05)
    assert place.world.most_waiting == TURNS
    place.world.set(hang=False)
    assert [writer.end() for writer in writers] == [None] * len(writers)
    assert place.world.most_waiting == TURNS


def test_a_worker_that_is_both_receives_while_its_own_writes_wait(make: Make) -> None:
    """Otherwise workers with this role could all wait for each other's turns."""
    place = make()
    session, token = place.connect(), place.token()
    turns = place.kind.device.turns[PEER]
    turns.make(place.kind.batch_bytes)
    with ExitStack() as taken:
        for _ in range(TURNS):
            taken.enter_context(turns.take(lambda: None))
        session.move("write", token, range(40), range(40))
    assert place.moved(range(40))


# ---------------------------------------------------------------------- who can reach whom


@pytest.mark.parametrize(
    ("detail", "why"),
    [
        ("23203/GPU-1/0", None),
        ("23201/GPU-1/0", None),
        ("23203/GPU-0/1", "same GPU.*NCCL_MULTI_RANK_GPU_ENABLE"),
        ("22903/GPU-1/0", "it has NCCL 2.29.3, we have 2.32.3"),
        ("", "no version"),
        ("x/GPU-1/0", "no version"),
        ("9" * 5000, "no version"),
    ],
)
def test_can_reach_says_why_not(detail: str, why: str | None) -> None:
    reason = FakeKind(World()).can_reach(detail)
    assert (reason is None) == (why is None)
    assert why is None or re.search(why, str(reason))


# ---------------------------------------------------------------------- when it goes wrong


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.essential
def test_a_revoke_ends_a_transfer_that_hangs_and_nothing_lands_afterwards(
    make: Make, launched: bool
) -> None:
    place = make()
    session, token = place.connect(), place.token()
    call = hanging(place, session, token, launched=launched)
    fences = place.region.owner.fences
    assert not fences.try_revoke(token)
    eventually(lambda: fences.try_revoke(token), "never proved")
    place.region.data[:] = 7
    place.world.set(hang=False, hang_issue=False)
    assert isinstance(call.end(), Fenced)
    assert bool((place.region.data == 7).all())
    fresh = place.token()
    session.move("write", fresh, range(40), range(40))
    assert place.moved(range(40))


def test_no_proof_while_cuda_does_not_say_that_the_gpu_is_quiet(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    call = hanging(place, session, token)
    place.world.set(dumb_streams=10**9)
    fences = place.region.owner.fences
    while place.world.revokes == 0:
        assert not fences.try_revoke(token)
    for _ in range(50):
        assert not fences.try_revoke(token)
        time.sleep(0.002)  # the threads that would let go of the fence have time to do it
    place.world.set(dumb_streams=0)
    eventually(lambda: fences.try_revoke(token), "never proved")
    assert isinstance(call.end(), Fenced)


def test_a_communicator_that_never_comes_up_ends_the_operation_only(make: Make) -> None:
    """As behind a firewall: the hosts reach each other's KV port, but not NCCL's."""
    place = make()
    session, token = place.connect(), place.token()
    session._backend.link.set_stall(0.5)
    place.world.set(hang_init=True)
    with pytest.raises(TransferFailed):
        session.move("write", token, range(40), range(40))
    # Nothing of ours was known to NCCL; the owner's thread has yet to see that the peer is gone.
    eventually(lambda: place.region.owner.fences.try_revoke(token), "never proved")
    place.world.set(hang_init=False)
    session.move("write", place.token(), range(40), range(40))
    assert place.moved(range(40))


@pytest.mark.parametrize("verb", ["write", "read"])
def test_no_kernel_waits_while_the_sender_still_gathers(make: Make, verb: Direction) -> None:
    place = make(layout="padded-heads", local="padded-heads")
    session, token = place.connect(), place.token()
    session.move("write", token, range(1), range(1))
    sender = (place.kind.peer if verb == "write" else place.kind).gpu
    before = sender.copies
    sender.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(session.move, verb, token, range(10), range(10))
        eventually(lambda: sender.copies > before, "it does not gather")
        time.sleep(0.1)
        waiting = [place.world.waiting(gpu) for gpu in ("GPU-0", "GPU-1")]
        sender.hold.set()
        moving.result(20)
    assert waiting == [0, 0]


def test_a_gpu_without_room_for_turns_offers_no_nccl(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, kind = make(), PairKind(World())
    refuse = Mock(side_effect=TransferFailed("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"))
    monkeypatch.setattr(kind.gpu, "allocate", refuse)
    assert kind.detail(place.mine.memory) is None
    with pytest.raises(TransferFailed, match=r"no 128 MiB .* --gpu-memory-utilization"):
        kind.make(place.mine.memory, Mock(), owner=True)
    monkeypatch.undo()
    assert kind.detail(place.mine.memory) is not None


def test_a_batch_that_cannot_be_staged_is_refused(make: Make) -> None:
    """Another worker may ask for larger batches than we do."""
    place = make(layout="padded-heads")
    runs = stream_of(place.region.memory, np.arange(40))
    with pytest.raises(TransferFailed, match="can be staged"):
        Laid(runs, 8 << 10, Turn(0, size_of(runs) - 1, place.kind.gpu))
