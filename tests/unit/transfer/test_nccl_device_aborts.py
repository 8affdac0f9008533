"""Aborts of several communicators on one GPU: each frees memory, and that waits for all kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.nccl.device import State
from tests.support.fake_nccl import CUDA_ERROR, World
from tests.support.nccl_comms import Here, Running, clean_world, impatient, patient
from tests.support.waiting import eventually


@pytest.fixture
def world() -> Iterator[World]:
    with clean_world() as made:
        yield made


def given_up(here: Here, *numbers: int) -> list[Running]:
    """Receives that end while NCCL launches their groups. Their kernels never end by themselves."""
    here.world.set(hang=True)
    busy = here.receive_in_vain(2)  # it holds up the aborts until all are given up
    here.world.set(hang_issue=True)
    transfers = [Running(here.ours[n], False, np.zeros(100, np.uint8)) for n in numbers]
    comms = [transfer.comm for transfer in transfers]
    eventually(lambda: all(c.state is State.ISSUING for c in comms), "not issued")
    for transfer in transfers:
        transfer.stop.set()
    eventually(lambda: all(c.state is State.DEAD for c in comms), "not given up")
    here.world.set(hang_issue=False)
    assert "stopped" in str(busy.give_up())
    return transfers


def test_two_groups_that_nccl_launches_after_they_were_given_up(world: World) -> None:
    """One abort after the other would wait for ever: the first for the kernel of the second."""
    here = Here(world, peers=3)
    here.wait_ready()
    for number in range(3):
        here.move(number)
    for transfer in given_up(here, 0, 1):
        assert "stopped" in str(transfer.end())
    here.close()


def test_a_group_that_is_never_launched_is_aborted_after_those_that_are(world: World) -> None:
    """Its abort waits for its launch, and that may wait for the kernels of the others."""
    here = Here(world, peers=3)
    here.wait_ready()
    for number in (1, 2):  # 0 is not connected, and its peer never asks for it
        here.move(number)
    for transfer in given_up(here, 0, 1):
        assert "stopped" in str(transfer.end())
    here.close()


def test_one_that_cannot_be_made_is_freed_when_nothing_else_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort at once would wait for the kernel that runs, and nobody could stop that one."""
    here = Here(world)
    here.wait_ready()
    world.set(hang=True)
    busy = here.receive_in_vain()
    init = world.ncclCommInitRankConfig

    def fail(*arguments: Any) -> int:
        init(*arguments)
        return CUDA_ERROR

    monkeypatch.setattr(world, "ncclCommInitRankConfig", fail)
    device = here.devices[0]
    refused = device.communicator(device.unique_id(patient), 0)
    with pytest.raises(TransferFailed, match="unhandled cuda error"):
        refused.wait_ready(impatient(5.0))
    assert "stopped" in str(busy.give_up())
    eventually(lambda: world.aborts == 3, "not freed")
    here.close()
