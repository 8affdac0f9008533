"""The nccl transport when something goes wrong: revokes, dead peers, stalls, refusals. NCCL and the
GPUs are of plain memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.errors import Fenced, TransferFailed
from tests.support.nccl_places import Make, Writing, hanging, places
from tests.support.transfer_rigs import DENSE, assert_same
from tests.support.waiting import eventually


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with places(tmp_path) as build:
        yield build


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


@pytest.mark.essential
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
    session._connection.interrupt()  # type: ignore[attr-defined]
    fences = place.region.owner.fences
    eventually(lambda: fences.try_revoke(token), "never proved")
    place.world.set(hang=False)
    assert writing.end() is not None
    session.close()


def test_a_transfer_without_progress_ends_by_itself(make: Make) -> None:
    place = make()
    session, token = place.connect(), place.token()
    session.write_blocks(token, [0], [0])
    place.hurry(session)
    writing = hanging(place, session, token)
    assert isinstance(writing.end(), TransferFailed)
    eventually(lambda: not place.world.comms, "a broken communicator is kept")
    place.world.set(hang=False)
    session.write_blocks(token, range(40), range(40))
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
    place = make()
    session, token = place.connect(), place.token()
    place.hurry(session)
    place.world.set(hang_init=True)
    with pytest.raises(TransferFailed):
        session.write_blocks(token, range(40), range(40))
    # Nothing of ours was known to NCCL; the owner's thread has yet to see that the peer is gone.
    eventually(lambda: place.region.owner.fences.try_revoke(token), "never proved")
    place.world.set(hang_init=False)
    session.write_blocks(place.token(), range(40), range(40))
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
