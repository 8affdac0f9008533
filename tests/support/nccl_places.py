"""The two sides of the nccl transport in one process, on GPUs and an NCCL of plain memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pullfill.transfer.contract import PeerSession
from pullfill.wire import FenceToken
from tests.support.fake_nccl import World
from tests.support.nccl_comms import Calling
from tests.support.nccl_gpus import PairKind
from tests.support.stream_held import served
from tests.support.transfer_rigs import DENSE, LAYOUTS, Local, Region, Rig, stream_rig
from tests.support.waiting import eventually

HURRY_S = 0.5
"""Longer than a thread stands still on a busy machine."""


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

    def hurry(self, session: PeerSession) -> None:
        """The session's connection waits for `HURRY_S` at most, on both sides. Later ones wait
        longer again."""
        session._connection.set_stall(HURRY_S)  # type: ignore[attr-defined]
        eventually(lambda: len(served(self.region)) == 1, "not one connection")
        (peer,) = served(self.region)
        peer._connection.set_stall(HURRY_S)

    def moved(self, blocks: range) -> bool:
        return bool((self.region.pages[:, blocks] == self.mine.pages[:, blocks]).all())


Make = Callable[..., Place]


@contextmanager
def places(directory: Path) -> Iterator[Make]:
    """Makes places. At the end each closes, and no communicator, stream or thread is left."""
    before = set(threading.enumerate())
    made: list[Place] = []

    def build(*, layout: str = "dense") -> Place:
        world = World()
        kind = PairKind(world, message_bytes=8 << 10, batch_bytes=64 << 10)
        rig = stream_rig(directory, kind)
        place = Place(world, kind, rig, rig.region(LAYOUTS[layout]), rig.local(DENSE))
        made.append(place)
        return place

    yield build
    for place in made:
        place.world.set(hang_init=False, hang_issue=False, dumb_streams=0)
        place.region.owner.close()
        world = place.world
        eventually(lambda w=world: not (w.comms or w.streams), "a comm or a stream is left")  # type: ignore[misc]
        assert place.world.violations == []
        assert place.world.streams == {}
    eventually(lambda: set(threading.enumerate()) <= before, "a thread is left")


class Writing(Calling):
    """One `write_blocks`."""

    def __init__(self, session: PeerSession, token: FenceToken, blocks: range) -> None:
        super().__init__()
        self.session, self.token, self.blocks = session, token, blocks
        self.start()

    def run(self) -> None:
        try:
            self.session.write_blocks(self.token, self.blocks, self.blocks)
        except BaseException as exc:
            self.error = exc


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
