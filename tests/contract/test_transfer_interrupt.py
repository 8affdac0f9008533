"""A peer that gives its owner up: what waits for a stopped decode worker ends at once, and with it
whoever waits for that (an engine step that pushes, a preemption, a worker that leaves)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pullfill.decode_worker.kv_reader import KvReader
from pullfill.errors import HandoffError, TransferFailed
from pullfill.net.channel import split_address
from pullfill.prefill_worker.transfer_worker import Credits, TransferWorker
from pullfill.transfer.contract import Direction
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.stream import kv_protocol
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken
from tests.support.fake_nccl import World
from tests.support.fakes import prefill_task
from tests.support.nccl_rig import PairKind
from tests.support.proxy import Proxy
from tests.support.transfer_rigs import DENSE, Local, Region, Rig, shm_rig, stream_rig
from tests.support.waiting import eventually

LONG = dense_layout(2, 64, 2, 96 << 10)  # 24 MiB: more than the kernel keeps
BLOCKS = range(64)
FOREVER_S = 1000.0


class Stuck:
    """Owners' threads stop inside their first batch, as those of a stopped process do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

        def enter(hold: ShmHold, token: FenceToken, real: Any = ShmHold.enter) -> None:
            real(hold, token)
            self.reached.set()
            self.go_on.wait(60)

        monkeypatch.setattr(ShmHold, "enter", enter)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck(monkeypatch)
    yield made
    made.go_on.set()


@pytest.fixture(params=["tcp", "nccl"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    kind = TcpKind() if request.param == "tcp" else PairKind(World())
    made = stream_rig(tmp_path, kind, stall_s=FOREVER_S)
    yield made
    made.close()


@pytest.fixture
def pair(rig: Rig, stuck: Stuck) -> tuple[Region, Local]:
    return rig.region(LONG), rig.local(LONG)


def failure_of(move: Callable[[], object], reached: threading.Event, end: Callable[[], None]):
    """What `move` raises on another thread when `end` comes after it got stuck."""
    with ThreadPoolExecutor(1) as thread:
        moving = thread.submit(move)
        assert reached.wait(20)
        end()
        return moving.exception(20)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_move_that_waits_for_its_owner(
    rig: Rig, pair: tuple[Region, Local], stuck: Stuck, verb: Direction
) -> None:
    region, mine = pair
    session, token = rig.connect(mine, region), region.owner.fences.open(BLOCKS)
    failure = failure_of(
        lambda: session.move(verb, token, BLOCKS, BLOCKS), stuck.reached, session.interrupt
    )
    assert isinstance(failure, TransferFailed)
    assert len(region.owner._server.peers) == 1, "the owner is not asked for its reasons"
    stuck.go_on.set()
    session.interrupt()
    with pytest.raises(TransferFailed, match="interrupted"):
        session.move(verb, token, [1], [1])
    session.close()
    session.interrupt()


def test_a_connection_being_made(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """To an owner that accepts (its kernel does) and says nothing."""
    monkeypatch.setattr(kv_protocol, "HELLO_S", FOREVER_S)
    region, mine = rig.region(DENSE), rig.local(DENSE)
    address, _, detail = region.descriptor.endpoints[rig.name].partition("#")
    with Proxy(split_address(address)) as proxy, ThreadPoolExecutor(1) as thread:
        endpoints = {rig.name: f"tcp://{proxy.address}#{detail}"}
        session, token = (
            rig.connect(mine, region, endpoints=endpoints),
            region.owner.fences.open([1]),
        )
        proxy.blackhole()
        proxy.reset()
        moving = thread.submit(session.move, "write", token, [1], [1])
        eventually(lambda: proxy.accepted == 2, "it does not connect again")
        session.interrupt()
        assert isinstance(moving.exception(20), TransferFailed)
        session.close()


def test_a_transfer_worker_that_is_closed_lets_its_engine_go_on(
    rig: Rig, pair: tuple[Region, Local], stuck: Stuck
) -> None:
    region, mine = pair
    transfer_worker = TransferWorker(
        rig.connect(mine, region), "decode-1", [mine.memory], Credits(1 << 20)
    )
    ends: list[BaseException | None] = []
    token = region.owner.fences.open(BLOCKS)
    task = prefill_task(
        transfer_worker, ends.append, tokens=range(1024), block=16, blocks=BLOCKS, fence=token
    )
    transfer_worker.write(task, list(BLOCKS), list(BLOCKS), True, lambda *_: None)
    step = threading.Thread(target=transfer_worker.flush, args=(task,))  # before a preemption
    step.start()
    assert stuck.reached.wait(20)
    transfer_worker.close()
    step.join(20)
    assert not step.is_alive(), "the step waits for as long as a flush may take"
    assert transfer_worker.flush(task, 20)
    assert isinstance(ends[0], TransferFailed)
    assert transfer_worker.join(20)


def test_a_reader_that_is_closed_waits_for_nobody(
    rig: Rig, pair: tuple[Region, Local], stuck: Stuck
) -> None:
    region, mine = pair
    reader = KvReader("prefill-1", lambda: rig.connect(mine, region), set())
    token = region.owner.fences.open(BLOCKS)
    failure = failure_of(
        lambda: reader._read(token, BLOCKS, BLOCKS, lambda: True), stuck.reached, reader.close
    )
    assert isinstance(failure, TransferFailed)


def test_a_reader_that_is_closed_begins_nothing(tmp_path: Path) -> None:
    rig = shm_rig(tmp_path)
    region, mine = rig.region(DENSE), rig.local(DENSE)
    reader = KvReader("prefill-1", lambda: rig.connect(mine, region), set())
    reader.close()
    with pytest.raises(HandoffError, match="leaving"):
        reader._read(region.owner.fences.open([1]), [1], [1], lambda: True)
    reader.close()
    rig.close()
