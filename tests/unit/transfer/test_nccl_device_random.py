"""Transfers, ends and faults in random order on one GPU with four peers. Whatever comes, every
transfer ends once it is given up, no rule of NCCL's is broken, and nothing is left."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.nccl.device import Communicator
from tests.support.fake_nccl import World
from tests.support.nccl_rig import Here, Running, clean_world, data, impatient, patient

PEERS = 4
RARE = ("hang", "close", "kill", "fail")
OPERATIONS = ("run", "stop", "run", "stop", "run", "hang_issue", "hang_issue", "renew", *RARE)


class Dice:
    """Does one operation at a time."""

    def __init__(self, world: World, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.here = Here(world, PEERS)
        for comm in (*self.here.ours, *self.here.theirs):
            comm.wait_ready(patient)
        for peer in range(PEERS):
            self.here.move(peer)
        self.transfers: list[Running] = []

    def step(self) -> None:
        name, peer = self.random.choice(OPERATIONS), self.random.randrange(PEERS)
        if name in ("hang", "hang_issue"):
            self.world.set(**{name: self.random.random() < 0.5})
        elif name in ("kill", "fail"):
            if self.random.random() < 0.3:
                getattr(self.world, name)(f"GPU-{1 + peer}")
        else:
            getattr(self, name)(peer)
        if self.random.random() < 0.1:
            time.sleep(0.001)

    def busy(self, comm: Communicator) -> bool:
        return any(transfer.comm is comm and transfer.is_alive() for transfer in self.transfers)

    def run(self, peer: int) -> None:
        """Both sides, or one that waits in vain."""
        for comm, send in ((self.here.theirs[peer], True), (self.here.ours[peer], False)):
            if self.random.random() < 0.85 and not self.busy(comm):
                array = data(1, 100) if send else np.zeros(100, np.uint8)
                self.transfers.append(Running(comm, send, array))

    def stop(self, peer: int) -> None:
        if self.transfers:
            self.random.choice(self.transfers).stop.set()

    def close(self, peer: int) -> None:
        comm = self.random.choice([self.here.ours[peer], self.here.theirs[peer]])
        if not self.busy(comm):
            comm.close()

    def renew(self, peer: int) -> None:
        """A communicator that is over, on both sides."""
        ours, theirs = self.here.ours[peer], self.here.theirs[peer]
        if not ours.usable and not self.busy(ours) and not self.busy(theirs):
            theirs.close()
            here, there = self.here.devices[0], self.here.devices[1 + peer]
            unique_id = here.unique_id(impatient(20))
            self.here.ours[peer] = here.communicator(unique_id, 0)
            self.here.theirs[peer] = there.communicator(unique_id, 1)

    def end(self) -> None:
        for transfer in self.transfers:
            transfer.stop.set()
        for transfer in self.transfers:
            assert isinstance(transfer.end(), TransferFailed | None)
        self.here.close()


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_any_order_of_transfers_ends_and_faults(first: int) -> None:
    for seed in range(first, first + 10):
        with clean_world() as world:
            dice = Dice(world, seed)
            for _ in range(dice.random.randrange(30, 90)):
                dice.step()
            dice.end()
            # The only rule that a fault can break: it may come between a look and a call.
            world.violations = [text for text in world.violations if "after an error" not in text]
