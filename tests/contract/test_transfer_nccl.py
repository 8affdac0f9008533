"""The nccl planes end to end, over a fake of NCCL: idle communicators, faults, revokes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pullfill.errors import ConfigError, Fenced, PeerUnavailable, TransferFailed
from pullfill.transfer.contract import PeerSession
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.nccl.cuda import CudaGpus
from pullfill.transfer.nccl.plane import NcclKind
from pullfill.transfer.nccl.staging import TURNS
from pullfill.wire import FenceToken
from tests.support.fake_nccl import World
from tests.support.nccl_gpus import FakeGpus, PairKind
from tests.support.transfer_rigs import DENSE, LAYOUTS, Local, Region, Rig, assert_same, stream_rig
from tests.support.waiting import eventually

LONG_S = 1000.0


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
    before = set(threading.enumerate())
    places: list[Place] = []

    def build(*, stall_s: float = 20.0, idle_s: float = LONG_S, layout: str = "dense") -> Place:
        world = World()
        kind = PairKind(world, message_bytes=8 << 10, batch_bytes=64 << 10, idle_s=idle_s)
        rig = stream_rig(tmp_path, kind, stall_s=stall_s)
        place = Place(world, kind, rig, rig.region(LAYOUTS[layout]), rig.local(DENSE))
        places.append(place)
        return place

    yield build
    for place in places:
        place.world.set(hang_init=False, hang_issue=False, dumb_streams=0)
        place.region.owner.close()
        eventually(lambda p=place: not p.world.comms, "a communicator is left")  # type: ignore[misc]
        assert place.world.violations == []
        assert place.world.streams == {}
    eventually(lambda: set(threading.enumerate()) <= before, "a thread is left")


class Writing(threading.Thread):
    def __init__(self, session: PeerSession, token: FenceToken, blocks: range) -> None:
        super().__init__()
        self.session, self.token, self.blocks = session, token, blocks
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.session.write_blocks(self.token, self.blocks, self.blocks)
        except BaseException as exc:
            self.error = exc

    def end(self) -> BaseException | None:
        self.join(20)
        assert not self.is_alive()
        return self.error


def hanging(place: Place, session: PeerSession, token: FenceToken) -> Writing:
    """A write whose kernels never end, both sides inside."""
    session.write_blocks(token, range(1), range(1))
    place.world.set(hang=True)
    writing = Writing(session, token, range(1, 40))
    eventually(
        lambda: place.world.waiting("GPU-0") == place.world.waiting("GPU-1") == 1,
        "the kernels do not start",
    )
    return writing


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


def test_an_idle_communicator_is_released_and_made_again_at_use(make: Make) -> None:
    place = make(idle_s=0.02)
    session, token = place.connect(), place.token()
    session.write_blocks(token, range(20), range(20))
    eventually(lambda: not place.world.comms, "kept though idle")
    session.write_blocks(token, range(20, 40), range(20, 40))
    assert place.moved(range(40))
    assert place.world.constructed >= 4
    session.close()


def test_an_owner_that_let_go_first_says_so_and_the_next_operation_works(make: Make) -> None:
    """Only when the peer was held up between its decision and its batch."""
    place = make()
    session, token = place.connect(), place.token()
    session.write_blocks(token, [0], [0])
    server = place.region.owner._server  # type: ignore[attr-defined]
    (connection,) = server._connections
    connection._plane.release_if_idle(float("inf"))
    eventually(lambda: len(place.world.comms) == 1, "not freed")
    with pytest.raises(TransferFailed):
        session.write_blocks(token, range(40), range(40))
    session.write_blocks(token, range(40), range(40))
    assert place.moved(range(40))
    session.close()


def test_what_is_in_use_is_not_released(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    writing = hanging(place, session, token)
    for connection in list(place.region.owner._server._connections):  # type: ignore[attr-defined]
        connection._plane.release_if_idle(float("inf"))
    assert len(place.world.comms) == 2
    session._plane.release_if_idle(float("inf"))  # type: ignore[attr-defined]
    assert len(place.world.comms) == 2
    while not place.region.owner.fences.try_revoke(token):
        pass
    assert isinstance(writing.end(), Fenced)
    session.close()


def test_two_peers_at_once_have_a_communicator_each(make: Make) -> None:
    place = make()
    token = place.token()
    other = place.rig.local(DENSE, seed=9)
    sessions = [place.connect(), place.rig.connect(other, place.region)]
    halves = [range(20), range(20, 40)]
    for _ in range(5):
        writers = [Writing(s, token, half) for s, half in zip(sessions, halves, strict=True)]
        assert [writer.end() for writer in writers] == [None, None]
    assert place.moved(halves[0])
    assert_same(place.region.pages[:, 20:], other.pages[:, 20:])
    assert place.world.constructed == 4
    for session in sessions:
        session.close()


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


def test_a_peer_killed_in_a_transfer_holds_up_no_other(make: Make) -> None:
    """Its kernel waits on the owner's GPU until the revoke. Meanwhile the others go on, and one of
    them closes its communicator, which frees memory of the GPU."""
    place = make()
    token, fences = place.token(), place.region.owner.fences
    sessions = [place.rig.connect(place.rig.local(DENSE, seed=n), place.region) for n in (7, 8)]
    for session in sessions:
        session.write_blocks(token, [0], [0])
    victim = hanging(place, sessions[0], fences.open(range(40)))
    for comm in place.world.comms.values():
        comm.dead = comm.dead or (comm.device == "GPU-1" and comm.pair.waiting != [])
    place.world.set(hang=False)
    sessions[1].close()
    fresh = place.connect()
    fresh.write_blocks(token, range(40), range(40))
    assert place.moved(range(40))
    assert victim.is_alive()
    sessions[0].interrupt()
    assert victim.end() is not None
    fresh.close()


# ---------------------------------------------------------------------- faults


def test_a_revoke_ends_a_transfer_that_hangs_and_nothing_lands_afterwards(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    writing = hanging(place, session, token)
    fences = place.region.owner.fences
    assert not fences.try_revoke(token)
    eventually(lambda: fences.try_revoke(token), "never proved")
    place.region.data[:] = 7
    place.world.set(hang=False)
    assert isinstance(writing.end(), Fenced)
    assert bool((place.region.data == 7).all())
    fresh = place.token()
    session.write_blocks(fresh, range(40), range(40))
    assert place.moved(range(40))
    session.close()


def test_no_proof_while_cuda_does_not_say_that_the_gpu_is_quiet(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    writing = hanging(place, session, token)
    place.world.set(dumb_streams=10**9)
    fences = place.region.owner.fences
    while place.world.revokes == 0:
        assert not fences.try_revoke(token)
    for _ in range(50):
        assert not fences.try_revoke(token)
    place.world.set(dumb_streams=0)
    eventually(lambda: fences.try_revoke(token), "never proved")
    assert isinstance(writing.end(), Fenced)
    session.close()


def test_a_peer_that_dies_in_a_transfer_holds_nothing(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    writing = hanging(place, session, token)
    session._link.interrupt()  # type: ignore[attr-defined]
    fences = place.region.owner.fences
    eventually(lambda: fences.try_revoke(token), "never proved")
    place.world.set(hang=False)
    assert writing.end() is not None
    session.close()


def written(session: PeerSession, token: FenceToken) -> None:
    """Write all blocks. On a busy machine a whole peer may stand still for `stall_s` too."""
    for _ in range(50):
        with contextlib.suppress(TransferFailed):
            session.write_blocks(token, range(40), range(40))
            return
    raise AssertionError("no write succeeds")


def test_a_transfer_without_progress_ends_by_itself(make: Make) -> None:
    place = make(stall_s=0.1)
    session, token = place.connect(), place.token()
    writing = hanging(place, session, token)
    assert isinstance(writing.end(), TransferFailed)
    eventually(lambda: not place.world.comms, "a broken communicator is kept")
    place.world.set(hang=False)
    written(session, token)
    assert place.moved(range(40))
    session.close()


def test_a_group_that_is_never_launched_is_ended_by_a_revoke_too(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    place.world.set(hang_issue=True)
    writing = Writing(session, token, range(40))
    eventually(
        lambda: sum(comm.doing == "issue" for comm in place.world.comms.values()) == 2,
        "the groups do not begin",
    )
    fences = place.region.owner.fences
    eventually(lambda: fences.try_revoke(token), "never proved")
    assert isinstance(writing.end(), Fenced)
    session.close()


def test_a_communicator_that_never_comes_up_ends_the_operation_only(make: Make) -> None:
    place = make(stall_s=0.1)
    session, token = place.connect(), place.token()
    place.world.set(hang_init=True)
    with pytest.raises(TransferFailed):
        session.write_blocks(token, range(40), range(40))
    # Nothing of ours was known to NCCL; the owner's thread has yet to see that the peer is gone.
    eventually(lambda: place.region.owner.fences.try_revoke(token), "never proved")
    place.world.set(hang_init=False)
    written(session, place.token())
    assert place.moved(range(40))
    session.close()


def test_a_refused_batch_costs_no_communicator_and_keeps_the_one_there_is(make: Make) -> None:
    place = make()
    session, fences = place.connect(), place.region.owner.fences
    dead = place.token()
    assert fences.try_revoke(dead)
    with pytest.raises(Fenced):
        session.write_blocks(dead, range(40), range(40))
    assert place.world.constructed == 0
    token = place.token()
    session.write_blocks(token, range(10), range(10))
    before = place.region.data.copy()
    with pytest.raises(Fenced):
        session.write_blocks(dead, range(10, 40), range(10, 40))
    assert_same(place.region.data, before)
    session.write_blocks(token, range(10, 40), range(10, 40))
    assert place.world.constructed == 2, "made again after a mere refusal"
    assert place.moved(range(40))
    session.close()


def test_long_operations_are_refused_between_batches(make: Make, tmp_path: Path) -> None:
    """A revoke in the middle of many batches: the peer hears of it, the connection stays."""
    place = make()
    layout = dense_layout(4, 40, 2, 64 << 10)
    region, mine = place.rig.region(layout, instance_id="decode-2"), place.rig.local(layout)
    session = place.rig.connect(mine, region)
    token = region.owner.fences.open(range(40))
    session.write_blocks(token, [0], [0])
    made = place.world.constructed
    writing = Writing(session, token, range(40))
    while not region.owner.fences.try_revoke(token):
        pass
    error = writing.end()
    assert error is None or isinstance(error, Fenced)
    fresh = region.owner.fences.open(range(40))
    session.write_blocks(fresh, range(40), range(40))
    assert_same(region.pages, mine.pages)
    assert place.world.constructed in (made, made + 2)
    session.close()
    region.owner.close()


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
