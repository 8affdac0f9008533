"""The nccl backends alone, over a link that is a pair of sockets: order, and words out of turn."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.errors import BadMessage, TransferFailed
from pullfill.transfer.nccl.gpu_turns import Laid, Turn
from pullfill.transfer.nccl.nccl_backend import NcclStart, NcclUse
from pullfill.transfer.runs import Runs
from pullfill.transfer.stream.backends import Backend, Interjected
from pullfill.wire.codec import Message, decode, encode
from tests.support.fake_nccl import World
from tests.support.nccl_rig import PairKind
from tests.support.transfer_rigs import DENSE, memory_over, random_bytes
from tests.support.waiting import eventually

STEP = 8 << 10
TOTAL = 20 << 10
REFUSAL = NcclUse(generation=9, message_bytes=STEP)
"""Any word that is none of the backend's own answers."""


class PairLink:
    """A connection that `interrupt` does not end: whatever ends must end by the backend's doing."""

    def __init__(self, sock: socket.socket, stall_s: float = 20.0) -> None:
        self._sock, self.stall_s = sock, stall_s

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def interrupt(self) -> None:
        pass

    def send(self, body: bytes) -> None:
        self._sock.send(body)

    def receive(self, limit: int = 1 << 20) -> bytes:
        return self._sock.recv(limit)


class Sides:
    """Owner and peer, each with a batch of bytes in three runs, cut differently."""

    def __init__(self) -> None:
        self.world = World()
        self.socks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.links = [PairLink(sock) for sock in self.socks]
        self.datas = [random_bytes(TOTAL, seed) for seed in (1, 2)]
        self.runs = [
            runs(data, cuts)
            for data, cuts in zip(self.datas, [(5000, 5001), (8 << 10, 16 << 10)], strict=True)
        ]
        memory = memory_over(random_bytes(1 << 20, 3), DENSE)
        self.kind = PairKind(self.world, message_bytes=STEP)
        self.backends: list[Backend] = [
            self.kind.make(memory, owner=owner) for owner in (True, False)
        ]
        for backend, other, link in zip(
            self.backends, self.backends[::-1], self.links, strict=True
        ):
            backend.start(link, other.setup)

    def say(self, rank: int, word: Message) -> None:
        """As if that side said it."""
        self.links[rank].send(encode(word))

    def both(self, owner: str, peer: str) -> None:
        """Call both sides, on a thread each. Raises what was raised first."""
        errors: list[BaseException] = []

        def call(rank: int, name: str) -> None:
            try:
                argument: Any = TOTAL if name == "discard" else self.runs[rank]
                getattr(self.backends[rank], name)(argument)
            except BaseException as exc:
                errors.append(exc)
                if not isinstance(exc, Interjected):  # as whoever owns the backend does
                    self.socks[rank].shutdown(socket.SHUT_RDWR)

        threads = [
            threading.Thread(target=call, args=pair, daemon=True)
            for pair in ((0, owner), (1, peer))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        if errors:
            raise errors[0]

    def refuse(self) -> None:
        """The owner answers in place of its word, and takes nothing."""
        self.say(0, REFUSAL)
        with pytest.raises(Interjected) as caught:
            self.both("discard", "send")
        assert caught.value.frame == encode(REFUSAL)


def runs(data: np.ndarray, cuts: tuple[int, ...]) -> Runs:
    ends = [*cuts, TOTAL]
    starts = [0, *cuts]
    iovec = np.array(
        [(data.ctypes.data + s, e - s) for s, e in zip(starts, ends, strict=True)], np.uint64
    )
    return Runs(iovec, TOTAL)


@pytest.fixture
def sides() -> Iterator[Sides]:
    made = Sides()
    yield made
    for backend in made.backends:
        backend.close()
        backend.close()
    for sock in made.socks:
        sock.close()
    eventually(lambda: not made.world.comms, "a communicator is left")
    assert made.world.violations == []
    assert made.world.streams == {}


def test_both_directions_and_a_discard_in_between(sides: Sides) -> None:
    theirs = sides.datas[1].copy()
    sides.both("receive", "send")
    np.testing.assert_array_equal(sides.datas[0], theirs)
    sides.datas[0][:] = random_bytes(TOTAL, 9)
    ours = sides.datas[0].copy()
    sides.refuse()
    np.testing.assert_array_equal(sides.datas[0], ours)
    sides.both("send", "receive")
    np.testing.assert_array_equal(sides.datas[1], ours)
    assert sides.world.constructed == 2
    assert sides.world.sizes == [STEP, STEP, TOTAL - 2 * STEP] * 2


def test_an_interrupt_alone_ends_a_receive(sides: Sides) -> None:
    """No socket is shut: the backend must notice by itself."""
    sides.both("receive", "send")
    before = sides.datas[0].copy()
    sides.say(1, NcclUse(generation=1, message_bytes=STEP))
    timer = threading.Timer(0.05, sides.backends[0].interrupt)
    timer.start()
    with pytest.raises(TransferFailed, match="interrupted"):
        sides.backends[0].receive(sides.runs[0])
    timer.join()
    np.testing.assert_array_equal(sides.datas[0], before)


def test_a_communicator_that_the_owner_does_not_have_is_named_as_such(sides: Sides) -> None:
    sides.say(1, NcclUse(generation=1, message_bytes=STEP))
    with pytest.raises(TransferFailed, match="given up here"):
        sides.backends[0].receive(sides.runs[0])
    sides.both("receive", "send")
    sides.say(1, NcclUse(generation=7, message_bytes=STEP))
    with pytest.raises(TransferFailed, match="given up here"):
        sides.backends[0].receive(sides.runs[0])


def test_words_out_of_turn_are_refused(sides: Sides) -> None:
    sides.say(1, NcclStart(unique_id=b"x"))
    with pytest.raises(BadMessage):
        sides.backends[0].receive(sides.runs[0])
    sides.say(1, NcclStart(unique_id=b"x"))
    with pytest.raises(BadMessage):
        sides.backends[0].discard(TOTAL)
    with pytest.raises(BadMessage):
        decode(encode(NcclUse(generation=1, message_bytes=1)), NcclUse)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(frame=st.binary(min_size=1, max_size=60), cut=st.integers(0, 40))
def test_whatever_a_peer_says_nothing_but_its_connection_ends(frame: bytes, cut: int) -> None:
    sides = Sides()
    valid = encode(NcclUse(generation=1, message_bytes=STEP))
    for said in (frame, valid[:cut] + frame + valid[cut + len(frame) :]):
        sides.links[1].send(said)
        with pytest.raises((BadMessage, TransferFailed)):
            sides.backends[0].receive(sides.runs[0])
    for sock in sides.socks:
        sock.close()


@pytest.mark.parametrize(("owner", "peer"), [("receive", "send"), ("send", "receive")])
def test_no_kernel_waits_while_the_sender_still_gathers(
    sides: Sides, owner: str, peer: str
) -> None:
    sides.runs[1] = runs(sides.datas[1], (5000, 5001))  # not contiguous in a message
    sides.both(owner, peer)
    sender = (sides.kind.gpus if owner == "send" else sides.kind.theirs).gpu
    before = sender.copies
    sender.hold.clear()
    moving = threading.Thread(target=sides.both, args=(owner, peer), daemon=True)
    moving.start()
    eventually(lambda: sender.copies > before, "it does not gather")
    time.sleep(0.1)
    waiting = [sides.world.waiting(gpu) for gpu in ("GPU-0", "GPU-1")]
    sender.hold.set()
    moving.join(20)
    assert waiting == [0, 0]
    assert sides.world.most_waiting == 1


def test_a_gpu_without_room_for_turns_offers_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PairKind(World())

    def refuse(_: int) -> int:
        raise TransferFailed("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(kind.gpus.gpu, "allocate", refuse)
    memory = memory_over(random_bytes(1 << 20, 3), DENSE)
    assert kind.detail(memory) is None
    with pytest.raises(TransferFailed, match=r"no 128 MiB .* --gpu-memory-utilization"):
        kind.make(memory, owner=True)
    monkeypatch.undo()
    assert kind.detail(memory) is not None


def test_a_batch_that_cannot_be_staged_is_refused(sides: Sides) -> None:
    """Another worker may ask for larger batches than we do."""
    turn = Turn(0, TOTAL - 1, sides.kind.gpus.gpu)
    with pytest.raises(TransferFailed, match="can be staged"):
        Laid(sides.runs[0], TOTAL, turn)
