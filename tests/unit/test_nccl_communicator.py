"""The life of a communicator, over a fake with cupy's signatures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.nccl.communicator import Communicator, LeftBehind, Message, settle
from tests.support.fake_nccl import FakeGpu, World
from tests.support.waiting import eventually


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    before = set(threading.enumerate())
    yield made
    made.set(hang_init=False, block_calls=False)
    eventually(lambda: not made.alive, "a communicator is left")
    eventually(lambda: set(threading.enumerate()) <= before, "a thread is left")
    assert made.violations == []
    assert made.memory == {}


def patient() -> None:
    """A watch that never gives up."""


def impatient(seconds: float = 0.1) -> Callable[[], None]:
    until = time.monotonic() + seconds

    def watch() -> None:
        if time.monotonic() > until:
            raise TransferFailed("too late")

    return watch


class Both:
    """Two ranks in one process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.left = LeftBehind()
        unique_id = world.get_unique_id()
        self.ranks = [
            Communicator(FakeGpu(world, f"GPU-{rank}"), unique_id, rank, self.left)
            for rank in (0, 1)
        ]

    def run(self, rank: int, send: bool, *arrays: np.ndarray) -> Running:
        messages = [Message(send, a.ctypes.data, a.nbytes) for a in arrays]
        return Running(self.ranks[rank], messages)

    def close(self) -> None:
        for comm in self.ranks:
            comm.close()
            comm.close()


class Running(threading.Thread):
    """One `run` on a thread; `end` gives what it raised."""

    def __init__(self, comm: Communicator, messages: list[Message]) -> None:
        super().__init__()
        self.comm, self.messages = comm, messages
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        def watch() -> None:
            if self.stop.is_set():
                raise TransferFailed("stopped")

        try:
            self.comm.run(self.messages, watch)
        except BaseException as exc:
            self.error = exc

    def end(self) -> BaseException | None:
        self.join(20)
        assert not self.is_alive()
        return self.error


@pytest.fixture
def both(world: World) -> Iterator[Both]:
    made = Both(world)
    for comm in made.ranks:
        comm.wait_ready(patient)
    yield made
    made.close()


def data(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_messages_meet_first_in_first_out(both: Both) -> None:
    sent = [data(seed, 100) for seed in range(3)]
    got = [np.zeros(100, np.uint8) for _ in range(3)]
    first = both.run(1, True, sent[0], sent[1])
    assert both.run(0, False, got[0], got[1]).end() is None
    assert first.end() is None
    second = both.run(0, True, sent[2])
    assert both.run(1, False, got[2]).end() is None
    assert second.end() is None
    np.testing.assert_array_equal(got, sent)


def test_another_size_is_a_fault_on_both_sides_and_the_end_of_the_communicator(both: Both) -> None:
    sender = both.run(1, True, data(1, 100))
    target = np.zeros(99, np.uint8)
    error = both.run(0, False, target).end()
    assert isinstance(error, TransferFailed)
    assert "expected 99" in str(error)
    assert isinstance(sender.end(), TransferFailed)
    assert not target.any()
    for comm in both.ranks:
        assert not comm.usable
        with pytest.raises(TransferFailed, match="over"):
            comm.run([], patient)
    assert both.world.aborts == 2


def test_giving_up_aborts_what_runs_on_the_gpu(both: Both) -> None:
    """The other side never sends. When `run` is back nothing is written, even if it sends then."""
    target = np.zeros(100, np.uint8)
    receiving = both.run(0, False, target)
    time.sleep(0.03)
    assert receiving.is_alive()
    receiving.stop.set()
    assert "stopped" in str(receiving.end())
    late = both.run(1, True, data(1, 100))
    late.stop.set()
    assert late.end() is not None
    assert not target.any()


def test_a_call_that_blocks_is_aborted_from_the_waiting_thread(both: Both) -> None:
    both.world.set(block_calls=True)
    receiving = both.run(0, False, np.zeros(100, np.uint8))
    eventually(lambda: both.world.blocked == 1, "the call does not block")
    receiving.stop.set()
    assert "stopped" in str(receiving.end())


def test_run_is_not_back_before_the_gpu_is_known_to_be_quiet(both: Both) -> None:
    both.world.set(dumb_streams=10**6)
    receiving = both.run(0, False, np.zeros(100, np.uint8))
    receiving.stop.set()
    eventually(lambda: both.world.aborts == 1, "not aborted")
    receiving.join(0.1)
    assert receiving.is_alive()
    both.world.set(dumb_streams=0)
    assert "stopped" in str(receiving.end())


def test_a_peer_that_dies_in_a_transfer_is_only_noticed_by_the_watch(both: Both) -> None:
    target = np.zeros(100, np.uint8)
    receiving = both.run(0, False, target)
    both.world.kill(1)
    sending = both.run(1, True, data(1, 100))
    receiving.join(0.05)
    assert receiving.is_alive()
    receiving.stop.set()
    sending.stop.set()
    assert receiving.end() is not None
    assert sending.end() is not None
    assert not target.any()


def test_a_constructor_that_does_not_return_is_left_behind_and_cleans_up_later(
    world: World,
) -> None:
    world.set(hang_init=True)
    both = Both(world)
    for comm in both.ranks:
        with pytest.raises(TransferFailed, match="too late"):
            comm.wait_ready(impatient())
        assert not comm.usable
    assert both.left.count == 2
    both.close()
    world.set(hang_init=False)
    eventually(lambda: both.left.count == 0, "a thread stays behind")
    assert world.constructed == world.aborts == 2


def test_too_many_left_behind_are_an_error_that_says_what_to_look_at(world: World) -> None:
    left = LeftBehind()
    go_on = threading.Event()
    for _ in range(LeftBehind.LIMIT):
        thread = threading.Thread(target=go_on.wait)
        thread.start()
        left.add(thread)
    with pytest.raises(TransferFailed, match="NCCL_SOCKET_IFNAME"):
        Communicator(FakeGpu(world, "GPU-0"), b"id", 0, left)
    go_on.set()
    eventually(lambda: left.count == 0, "the threads do not end")
    left.check()


def test_a_constructor_that_fails_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    monkeypatch.setattr(world, "NcclCommunicator", refuse)
    comm = Communicator(FakeGpu(world, "GPU-0"), b"id", 0, LeftBehind())
    with pytest.raises(TransferFailed, match="NCCL_ERROR_SYSTEM_ERROR"):
        comm.wait_ready(patient)
    comm.close()
    assert not comm.usable


def test_closing_a_healthy_one_waits_for_nobody(both: Both) -> None:
    both.ranks[0].close()
    assert both.world.aborts == 1
    assert both.ranks[1].usable, "NCCL does not tell the other side"


def test_two_hundred_leave_nothing(world: World) -> None:
    target, source = np.zeros(10, np.uint8), data(1, 10)
    for _ in range(200):
        both = Both(world)
        sending = both.run(1, True, source)
        assert both.run(0, False, target).end() is None
        assert sending.end() is None
        both.close()
    assert world.aborts == 400
    assert world.streams == {}


def test_settle_goes_on_until_the_gpu_answers() -> None:
    answers = iter([RuntimeError("no"), RuntimeError("no"), None])
    asked = []

    def synchronize() -> None:
        answer = next(answers)
        asked.append(answer)
        if answer is not None:
            raise answer

    settle(synchronize)
    assert len(asked) == 3
