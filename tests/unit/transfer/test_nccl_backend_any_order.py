"""Any order of batches, refusals and faults on a pair of nccl backends: the right
bytes or an error, and nothing left over."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pullfill.errors import TransferFailed
from tests.support.waiting import eventually
from tests.unit.transfer.test_nccl_backend import TOTAL, Sides


class Planes(RuleBasedStateMachine):
    """What a session and its owner do with their backends; both are made anew after an error."""

    @initialize()
    def connect(self) -> None:
        self.sides = Sides()
        self.seed = 0

    @rule()
    def write(self) -> None:
        self._move(0, "receive", "send")

    @rule()
    def read(self) -> None:
        self._move(1, "send", "receive")

    def _move(self, target: int, owner: str, peer: str) -> None:
        self.seed += 1
        fresh = np.random.default_rng(self.seed).integers(0, 256, TOTAL, dtype=np.uint8)
        self.sides.datas[1 - target][:] = fresh
        self.sides.both(owner, peer)
        np.testing.assert_array_equal(self.sides.datas[target], fresh)

    @rule()
    def refuse(self) -> None:
        """Where the peer would have to make a communicator, it waits for an id and hears this."""
        peer = self.sides.backends[1]
        if all(backend.resource is not None for backend in self.sides.backends):  # type: ignore[attr-defined]
            before = self.sides.datas[0].copy()
            self.sides.refuse()
            np.testing.assert_array_equal(self.sides.datas[0], before)
            assert peer.resource is not None  # type: ignore[attr-defined]

    @rule()
    def fault(self) -> None:
        """The kernels hang; both sides are interrupted."""
        if any(backend.resource is None for backend in self.sides.backends):  # type: ignore[attr-defined]
            return
        before = self.sides.datas[0].copy()
        self.sides.world.set(hang=True)
        for backend in self.sides.backends:
            backend.interrupt()
        try:
            self.sides.both("receive", "send")
        except TransferFailed:
            pass
        else:
            raise AssertionError("a hang ended well")
        self.sides.world.set(hang=False)
        np.testing.assert_array_equal(self.sides.datas[0], before)
        self._anew()

    def _anew(self) -> None:
        self._end()
        self.sides = Sides()

    def _end(self) -> None:
        for backend in self.sides.backends:
            backend.close()
        for sock in self.sides.socks:
            sock.close()
        eventually(lambda: not self.sides.world.comms, "a communicator is left")
        assert self.sides.world.streams == {}

    @invariant()
    def nothing_would_have_crashed(self) -> None:
        if hasattr(self, "sides"):
            assert self.sides.world.violations == []
            assert len(self.sides.world.comms) <= 2

    def teardown(self) -> None:
        if hasattr(self, "sides"):
            self._end()


Planes.TestCase.settings = settings(
    max_examples=25, stateful_step_count=12, derandomize=True, deadline=None
)
TestPlanes = Planes.TestCase
