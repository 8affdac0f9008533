"""The transports in which the owner's thread receives: what a revoke does to a receive that waits,
who is let in, and what a peer that misbehaves can do (nothing)."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pullfill.decode_worker.kv_reader import KvReader
from pullfill.errors import (
    AuthFailed,
    BadMessage,
    Fenced,
    HandoffError,
    PeerUnavailable,
    TransferFailed,
)
from pullfill.net.channel import split_address
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.transfer_worker import Copy, Credits, TransferWorker
from pullfill.runtime import metrics
from pullfill.transfer.contract import Direction
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import Iovec
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.stream import kv_protocol, stream_server
from pullfill.transfer.stream.kv_protocol import Answer, Operation, Status
from pullfill.transfer.stream.stream_peer import StreamSession, StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken, decode, encode
from tests.support.fake_nccl import World
from tests.support.fakes import prefill_task
from tests.support.loopback import Faults
from tests.support.nccl_rig import PairKind
from tests.support.proxy import Proxy
from tests.support.transfer_rigs import DENSE, Local, Region, Rig, assert_same, shm_rig, stream_rig
from tests.support.waiting import Call, eventually

LONG = dense_layout(2, 64, 2, 16 << 10)  # 4 MiB
Make = Callable[..., Rig]


def connections() -> set[threading.Thread]:
    """The owner's threads: each serves one connection."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv-127")}


def served(region: Region) -> list[Any]:
    """The peers that the owner's threads serve."""
    return region.owner._server.peers


def revoke(region: Region, token: FenceToken) -> None:
    # Within half of a connection's stall time, which would end the owner's receive as well.
    eventually(lambda: region.owner.fences.try_revoke(token), within_s=10.0)


class Held(Call):
    """Runs a move on a thread; the session's backend stops before its 2nd batch until `go_on`."""

    def __init__(self, session: Any, verb: str, token: FenceToken) -> None:
        self.stopped, self.go_on = threading.Event(), threading.Event()
        backend, calls = session._backend, [0]
        name = "send" if verb == "write" else "receive"
        real = getattr(backend, name)

        def stop(runs: Iovec) -> None:
            calls[0] += 1
            if calls[0] == 2:
                self.stopped.set()
                assert self.go_on.wait(20)
            real(runs)

        setattr(backend, name, stop)
        super().__init__(session.move, verb, token, range(64), range(64))
        assert self.stopped.wait(20)

    def finish(self) -> BaseException | None:
        self.go_on.set()
        return self.end()


class SmallBatches(TcpKind):
    batch_bytes = 256 << 10


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Rigs whose owners are closed; at the end no thread of theirs is left."""
    before = set(threading.enumerate())
    rigs: list[Rig] = []

    def build(**options: Any) -> Rig:
        rigs.append(stream_rig(tmp_path, SmallBatches(), **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()
    eventually(lambda: not [t for t in set(threading.enumerate()) - before if t.is_alive()])


def start(make: Make, **options: Any) -> tuple[Rig, Region, Local, Any, FenceToken]:
    rig = make(**options)
    region, mine = rig.region(LONG), rig.local(LONG)
    session = rig.connect(mine, region)
    return rig, region, mine, session, region.owner.fences.open(range(64))


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_revoke_does_not_wait_for_a_peer_that_says_or_takes_nothing(
    make: Make, verb: Direction
) -> None:
    """Unlike shm: the copy is ours, so it is interrupted, and the proof comes by itself."""
    rig = make()
    layout = dense_layout(2, 64, 2, 64 << 10)  # 16 MiB: more than the kernel keeps for a reader
    region, mine = rig.region(layout), rig.local(layout)
    session, token = rig.connect(mine, region), region.owner.fences.open(range(64))
    held = Held(session, verb, token)
    if verb == "write":
        eventually(lambda: (region.pages[0, :2] == mine.pages[0, :2]).all())  # the first batch
    revoke(region, token)
    region.data[:] = 7
    reused = region.owner.fences.open(range(64))
    assert isinstance(held.finish(), Fenced)
    assert (region.data == 7).all()
    session.move(verb, reused, range(64), range(64))
    assert_same(region.pages, mine.pages)


def test_a_writer_between_batches_is_refused_early(make: Make) -> None:
    _, region, mine, session, token = start(make)
    connection = session._backend.link
    real, calls = connection.input_waits, [0]

    def revoke_after_two() -> bool:
        calls[0] += 1
        if calls[0] == 4:  # once at the start of the operation
            eventually(lambda: (region.pages[0, :16] == mine.pages[0, :16]).all())
            revoke(region, token)
        if calls[0] == 5:
            eventually(real)  # the refusal of the third batch
        return bool(real())

    connection.input_waits = revoke_after_two
    with pytest.raises(Fenced):
        session.move("write", token, range(64), range(64))
    assert calls[0] == 5, "it went on sending after the refusal"
    fresh = region.owner.fences.open(range(64))
    session.move("write", fresh, [1], [2])
    assert (region.pages[:, 2] == mine.pages[:, 1]).all()


def test_a_batch_that_is_under_way_is_let_to_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "PATIENCE_S", 60.0)
    _, region, _, session, token = start(make)
    held = Held(session, "write", token)
    (peer,) = served(region)
    monkeypatch.setattr(peer._backend, "interrupt", lambda: pytest.fail("it was cut"))
    eventually(lambda: peer.inside == token)
    assert not region.owner.fences.try_revoke(token)
    assert not region.owner.fences.try_revoke(token)
    assert isinstance(held.finish(), Fenced)
    assert region.owner.fences.try_revoke(token)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_block_outside_the_grant_is_refused(make: Make, verb: Direction) -> None:
    _, region, mine, session, _ = start(make)
    token = region.owner.fences.open([1, 2])
    theirs, ours = region.data.copy(), mine.data.copy()
    with pytest.raises(BadMessage, match="outside the grant"):
        session.move(verb, token, [1, 3], [1, 3])
    assert_same(region.data, theirs)
    assert_same(mine.data, ours)
    session.move(verb, token, [1, 2], [1, 2])


@pytest.mark.parametrize("blocks", [[2, 1], [1, 1], [64]], ids=["unordered", "twice", "outside"])
def test_block_ids_that_only_a_faulty_peer_sends_are_refused(make: Make, blocks: list[int]) -> None:
    _, region, _, session, token = start(make)
    if blocks == [64]:  # of a live token, the grant refuses it
        revoke(region, token)
    ids = np.array(blocks, "<u4").tobytes()
    connection = session._backend.link
    connection.send(encode(Operation(verb="write", fence=token, blocks=ids)))
    assert decode(connection.receive(), Answer).status is Status.REFUSED


@pytest.mark.essential
def test_a_prefix_hit_is_read_and_never_written(make: Make) -> None:
    """Its blocks belong to other requests, too."""
    _, region, mine, session, _ = start(make)
    token, before = region.owner.fences.open([5, 1, 2], 1), region.data.copy()
    with pytest.raises(BadMessage, match="outside the grant"):
        session.move("write", token, [1, 5], [1, 5])
    assert_same(region.data, before)
    session.move("read", token, [5, 1, 2], [7, 8, 9])
    session.move("write", token, [1, 2], [1, 2])
    for ours, theirs in ((7, 5), (1, 1), (2, 2)):
        assert_same(mine.pages[:, ours], region.pages[:, theirs])


# --------------------------------------------------------------------------- who is let in


@pytest.mark.parametrize(
    ("theirs", "ours"), [(b"a", b"b"), (None, b"b"), (b"a", None)], ids=["other", "none", "extra"]
)
def test_another_cluster_key_is_refused(
    make: Make, theirs: bytes | None, ours: bytes | None
) -> None:
    rig = make(key=theirs and ClusterKey(theirs))
    region, mine = rig.region(DENSE), rig.local(DENSE)
    transport = StreamTransport(SmallBatches(), ours and ClusterKey(ours))
    with pytest.raises((AuthFailed, PeerUnavailable), match="key"):
        transport.connect(mine.memory, region.descriptor)


def test_with_the_cluster_key_blocks_move_and_frames_are_sealed(make: Make) -> None:
    rig = make(key=ClusterKey(b"secret"))
    region, mine = rig.region(LONG), rig.local(LONG)
    token = region.owner.fences.open(range(64))
    transport = StreamTransport(SmallBatches(), ClusterKey(b"secret"))
    session = transport.connect(mine.memory, region.descriptor)
    session.move("write", token, range(64), range(64))
    session.move("read", token, range(64), range(64))
    assert_same(region.pages, mine.pages)
    assert isinstance(session, StreamSession)
    connection = session._backend.link
    connection._out.of_next(b"")  # from here on our numbers are not the ones expected
    before = region.data.copy()
    mine.data[:] = 1
    with pytest.raises(TransferFailed):
        session.move("write", token, [0], [0])
    assert_same(region.data, before)
    session.move("write", token, [0], [0])  # a new connection
    session.close()


def dial(region: Region) -> socket.socket:
    host, port = split_address(region.descriptor.endpoints["tcp"])
    return socket.create_connection((host, port), 20)


def is_gone(dripping: socket.socket) -> bool:
    time.sleep(0.01)
    try:
        dripping.sendall(b"x")
    except OSError:
        return True
    return False


def test_who_says_nothing_is_soon_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However steadily an opening comes, it is one time for all of it."""
    monkeypatch.setattr(kv_protocol, "HELLO_S", 0.05)
    region = make().region(DENSE)
    with dial(region) as silent, dial(region) as dripping:
        dripping.sendall(struct.pack("<I", 200))
        eventually(lambda: is_gone(dripping))
        assert silent.recv(4096) == b""


def test_after_the_opening_its_limit_is_lifted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for hello_s in (0.25, 1.0, 4.0, 16.0):  # a busy machine needs longer for an opening
        monkeypatch.setattr(kv_protocol, "HELLO_S", hello_s)
        try:
            _, region, mine, session, token = start(make)
            break
        except (PeerUnavailable, TransferFailed):
            continue
    before = connections()
    time.sleep(1.4 * hello_s)
    session.move("write", token, range(64), range(64))
    assert connections() == before
    assert_same(region.pages, mine.pages)


def test_a_revoke_interrupts_only_the_batch_of_its_own_token(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on. The connection's thread cannot begin another operation in between."""
    monkeypatch.setattr(stream_server, "PATIENCE_S", 0.0)
    _, region, _, _, token = start(make)
    (peer,) = served(region)
    free: list[bool] = []

    def interrupt() -> None:
        free.append(peer._mutex.acquire(blocking=False))

    monkeypatch.setattr(peer._backend, "interrupt", interrupt)
    for inside in (None, FenceToken(slot=token.slot + 1, epoch=token.epoch), token):
        assert free == []
        peer.inside = inside
        peer.hurry(token)
    assert free == [False]
    peer.inside = None


# --------------------------------------------------------------------------- broken connections


def test_a_connection_that_broke_while_idle_is_made_anew(make: Make) -> None:
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    token = region.owner.fences.open([1])
    with Proxy(split_address(region.descriptor.endpoints["tcp"])) as proxy:
        session = rig.connect(mine, region, endpoints={"tcp": f"tcp://{proxy.address}"})
        proxy.reset()
        eventually(lambda: not connections())
        session.move("write", token, [1], [1])
        assert proxy.accepted == 2
        proxy.reset()
        eventually(lambda: not connections())
        region.owner.close()
        restarted = rig.region(DENSE, incarnation="i2")
        proxy.target = split_address(restarted.descriptor.endpoints["tcp"])
        with pytest.raises(Fenced, match="incarnation"):
            session.move("write", token, [1], [1])
    assert_same(region.pages[:, 1], mine.pages[:, 1])


def test_a_peer_that_stalls_in_an_operation_is_given_up(make: Make) -> None:
    """Also without a revoke: nothing waits for ever."""
    _, region, _, session, token = start(make, stall_s=0.25)
    held = Held(session, "write", token)
    eventually(lambda: not served(region))
    assert isinstance(held.finish(), TransferFailed), "the grant itself is still good"
    session.move("write", token, [1], [1])


def test_closing_the_owner_ends_a_receive_under_way(make: Make) -> None:
    _, region, _, session, token = start(make)
    held = Held(session, "write", token)
    region.owner.close()
    region.data[:] = 3
    error = held.finish()
    assert isinstance(error, Fenced | TransferFailed)
    assert (region.data == 3).all()


# --------------------------------------------------------------------------- room for connections


def refused(why: str) -> float:
    return metrics.KV_REFUSED.labels(why)._value.get()


@pytest.mark.essential
def test_connections_are_bounded_by_open_files(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_server.machine, "open_files", lambda: stream_server.FILES_SPARED + 4)
    before, connected = refused("open_files"), metrics.KV_CONNECTIONS._value.get()
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    sessions = [rig.connect(mine, region) for _ in range(2)]
    assert metrics.KV_CONNECTIONS._value.get() - connected == 2
    with pytest.raises(PeerUnavailable):
        rig.connect(mine, region)
    assert refused("open_files") - before == 1
    assert "ulimit -n" in caplog.text
    sessions.pop().close()
    eventually(lambda: len(served(region)) == 1)
    sessions.append(rig.connect(mine, region))
    for session in sessions:
        session.close()
    eventually(lambda: metrics.KV_CONNECTIONS._value.get() == connected)


def test_idle_connections_keep_no_peer_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them, renewed every 5 s, closed the port to everybody."""
    monkeypatch.setattr(stream_server, "MAX_STRANGERS", 4)
    before = refused("strangers")
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    fleet = [rig.connect(mine, region) for _ in range(8)]  # who has said hello is no stranger
    idle = [dial(region) for _ in range(4)]
    eventually(lambda: len(connections()) == 12)
    for ended in range(3):
        rig.connect(mine, region).close()
        assert refused("strangers") - before == ended + 1, "they are bounded"
        assert idle[ended].recv(1) == b"", "the oldest was ended"
        idle.append(dial(region))
        eventually(lambda: len(connections()) == 12)
    for each in (*idle, *fleet):
        each.close()
    eventually(lambda: not connections())


def test_a_worker_raises_its_limit_of_open_files() -> None:
    """Of its own process: it is started with the 1024 that distributions give."""
    script = (
        "import resource; from pullfill.net import this_host;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); this_host.allow_open_files();"
        "print(this_host.open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["300", "300"], done.stderr


# ------------------------------------------------------------------ a peer that gives its owner up
# What waits for a stopped decode worker ends at once, and with it whoever waits for that (an engine
# step that pushes, a preemption, a worker that leaves).


BIG = dense_layout(2, 64, 2, 96 << 10)  # 24 MiB: more than the kernel keeps
BLOCKS = range(64)
FOREVER_S = 1000.0


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Owners' threads stop inside their first batch, as those of a stopped process do."""
    faults = Faults()
    faults.hold()

    def enter(hold: ShmHold, token: FenceToken, real: Any = ShmHold.enter) -> None:
        real(hold, token)
        faults.inside_batch()

    monkeypatch.setattr(ShmHold, "enter", enter)
    yield faults
    faults.resume()


@pytest.fixture(params=["tcp", "nccl"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    kind = TcpKind() if request.param == "tcp" else PairKind(World())
    made = stream_rig(tmp_path, kind, stall_s=FOREVER_S)
    yield made
    made.close()


@pytest.fixture
def pair(rig: Rig, stuck: Faults) -> tuple[Region, Local]:
    return rig.region(BIG), rig.local(BIG)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_move_that_waits_for_its_owner(
    rig: Rig, pair: tuple[Region, Local], stuck: Faults, verb: Direction
) -> None:
    region, mine = pair
    session, token = rig.connect(mine, region), region.owner.fences.open(BLOCKS)
    moving = Call(session.move, verb, token, BLOCKS, BLOCKS)
    assert stuck.wait_held()
    session.interrupt()
    assert isinstance(moving.end(), TransferFailed)
    assert len(served(region)) == 1, "the owner is not asked for its reasons"
    stuck.resume()
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
    with Proxy(split_address(address)) as proxy:
        endpoints = {rig.name: f"tcp://{proxy.address}#{detail}"}
        session = rig.connect(mine, region, endpoints=endpoints)
        proxy.blackhole()
        proxy.reset()
        moving = Call(session.move, "write", region.owner.fences.open([1]), [1], [1])
        eventually(lambda: proxy.accepted == 2, "it does not connect again")
        session.interrupt()
        assert isinstance(moving.end(), TransferFailed)


def test_a_transfer_worker_that_is_closed_lets_its_engine_go_on(
    rig: Rig, pair: tuple[Region, Local], stuck: Faults
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
    copy = Copy(task, "write", list(BLOCKS), list(BLOCKS), lambda *_: None, last=True)
    transfer_worker.copy(copy)
    step = Call(transfer_worker.flush, task)  # before a preemption
    assert stuck.wait_held()
    transfer_worker.close()
    assert step.end() is None
    assert transfer_worker.flush(task, 20)
    assert isinstance(ends[0], TransferFailed)
    assert transfer_worker.join(20)


def test_a_reader_that_is_closed_waits_for_nobody(
    rig: Rig, pair: tuple[Region, Local], stuck: Faults
) -> None:
    region, mine = pair
    reader = KvReader("prefill-1", lambda: rig.connect(mine, region), set())
    token = region.owner.fences.open(BLOCKS)
    reading = Call(reader._read, token, BLOCKS, BLOCKS, lambda: True)
    assert stuck.wait_held()
    reader.close()
    assert isinstance(reading.end(), TransferFailed)


def test_a_reader_that_is_closed_begins_nothing(tmp_path: Path) -> None:
    rig = shm_rig(tmp_path)
    region, mine = rig.region(DENSE), rig.local(DENSE)
    reader = KvReader("prefill-1", lambda: rig.connect(mine, region), set())
    reader.close()
    with pytest.raises(HandoffError, match="leaving"):
        reader._read(region.owner.fences.open([1]), [1], [1], lambda: True)
    reader.close()
    rig.close()
