"""Copying, choosing, digests and the loopback's faults on demand."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import BadMessage, Fenced, IncompatibleError, PullfillError, TransferFailed
from pullfill.transfer import copying, digest
from pullfill.transfer.choose import choose
from pullfill.transfer.contract import KvLayout
from pullfill.transfer.digest import BlockDigester
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.loopback import LoopbackOwner
from pullfill.transfer.runs import Batch, Rows
from pullfill.transfer.shm.peer import ShmTransport
from pullfill.wire import DigestMode
from tests.support.transfer_rigs import (
    LAYOUTS,
    Local,
    Region,
    extent,
    loopback_rig,
    memory_over,
    pages,
    random_bytes,
    scattered,
    shm_rig,
)

LAYOUT = dense_layout(2, 8, 2, 64)


# --------------------------------------------------------------------------- copying


def _batch(count: int, size: int) -> Batch:
    order = np.random.default_rng(1).permutation(count) * size
    return Batch(list(range(0, count * size, size)), order.tolist(), [size] * count, count * size)


@pytest.fixture(params=["plain", "watched", "switching", "vectored"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way `copy_batch` can take, forced. `switching`: contention shows after a few calls."""
    assert copying.vectored_works(), "this machine should be able to copy by iovec"
    monkeypatch.setattr(copying, "vectored_works", lambda: request.param != "plain")
    until = math.inf if request.param == "vectored" else 0.0
    monkeypatch.setattr(copying, "_vectored_until", until)
    monkeypatch.setattr(copying, "_SLOW_S", -1.0 if request.param == "switching" else 1e9)
    monkeypatch.setattr(copying, "_SLOW_BYTES_PER_S", 1 << 60)
    idle = itertools.count(step=2 if request.param == "switching" else 0)
    monkeypatch.setattr(copying, "_idle", lambda: (count := next(idle), float(count)))
    return request.param


@pytest.mark.parametrize(("count", "size"), [(64, 48), (3, 300_000), (1, 5), (1000, 4096)])
def test_copy_batch(count: int, size: int, way: str) -> None:
    source, target = random_bytes(count * size, 1), np.zeros(count * size, np.uint8)
    batch = _batch(count, size)
    copying.copy_batch(source.ctypes.data, target.ctypes.data, batch)
    expected = np.empty_like(source).reshape(count, size)
    expected[np.array(batch.target) // size] = source.reshape(count, size)
    np.testing.assert_array_equal(target, expected.ravel())
    switched = way == "switching" and count > 8
    assert switched == (copying._vectored_until not in (0.0, math.inf))


@pytest.mark.parametrize("largest", [copying._LARGEST, 0])
@pytest.mark.parametrize("lengths", [[48, 16, 7] * 8, [41] * 24], ids=["unlike", "alike"])
@pytest.mark.parametrize("counts", [(3,), (2, 3), (1, 1)])
def test_copy_batch_with_rows(
    counts: tuple[int, ...],
    lengths: list[int],
    largest: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of several lengths or one, apart by other strides on either side; too far from each
    other for one array (`largest`)."""
    monkeypatch.setattr(copying, "_LARGEST", largest)
    rows = Rows(counts, (9000, 2500)[-len(counts) :], (7000, 2000)[-len(counts) :])
    sources, targets = range(0, 24 * 60, 60), range(23 * 50, -1, -50)
    batch = Batch([*sources], [*targets], lengths, sum(lengths) * rows.count, rows)
    source, target = random_bytes(30_000, 1), np.zeros(30_000, np.uint8)
    copying.copy_batch(source.ctypes.data, target.ctypes.data, batch)
    expected = np.zeros_like(target)
    flat = batch.flat()
    for s, t, n in zip(flat.source, flat.target, flat.nbytes, strict=True):
        expected[t : t + n] = source[s : s + n]
    np.testing.assert_array_equal(target, expected)


def test_a_contended_gil_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_vectored_until", 0.0)
    source, target = random_bytes(1 << 20, 1), np.zeros(1 << 20, np.uint8)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while copying._vectored_until == 0.0 and time.monotonic() < deadline:
            copying.copy_batch(source.ctypes.data, target.ctypes.data, _batch(1024, 1024))
    finally:
        stop.set()
        thread.join()
    assert copying._vectored_until > 0.0


def test_short_vectored_copy_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_vectored_until", math.inf)
    data = np.zeros(1 << 16, np.uint8)
    batch = _batch(8, 64)
    with pytest.raises(TransferFailed, match="of 512 bytes"):
        copying.copy_batch(data.ctypes.data, 4096, batch)  # page 1 is never mapped


# --------------------------------------------------------------------------- choosing


class Fake:
    def __init__(self, name: str, why_not: str | None = None) -> None:
        self.name, self.why_not = name, why_not

    def can_reach(self, descriptor: object) -> str | None:
        return self.why_not

    connect = None


def test_best_reachable_transport_is_chosen_with_reasons(tmp_path: Path) -> None:
    region = shm_rig(tmp_path).region(LAYOUT)
    region.owner.close()
    descriptor = msgspec.structs.replace(
        region.descriptor, endpoints={"tcp": "t", "shm": "x", "odd": "o"}
    )
    tcp, cuda, odd = Fake("tcp"), Fake("cuda_ipc"), Fake("odd")
    chosen, why_not = choose(descriptor, [odd, tcp, ShmTransport(), cuda])  # type: ignore[list-item]
    assert chosen is tcp
    assert [name for name, _ in why_not] == ["cuda_ipc", "shm"]
    assert "does not offer" in why_not[0][1]
    assert "endpoint" in why_not[1][1]
    assert choose(descriptor, [odd])[0] is odd  # type: ignore[list-item]
    with pytest.raises(IncompatibleError, match=r"tcp: cut off; .*odd: not available") as caught:
        choose(descriptor, [Fake("tcp", "cut off")])  # type: ignore[list-item]
    assert caught.value.field == "endpoints"


# --------------------------------------------------------------------------- digests


def test_digest_depends_on_bytes_and_order_not_on_strides() -> None:
    wide = KvLayout(5, 2, 8, 2, 64, layer_stride=2000, block_stride=200, head_stride=80)
    a, b = random_bytes(2 * 8 * 2 * 64, 1), np.zeros(4100, np.uint8)
    mine, theirs = Local(a, memory_over(a, LAYOUT)), Local(b, memory_over(b, wide))
    theirs.pages[:] = mine.pages
    made = BlockDigester(mine.memory).digest([3, 1])
    assert made == BlockDigester(theirs.memory).digest([3, 1])
    assert made != BlockDigester(mine.memory).digest([1, 3])
    theirs.pages[1, 3, 1, 63] ^= 1
    assert made != BlockDigester(theirs.memory).digest([3, 1])
    assert BlockDigester(mine.memory).digest([]) == BlockDigester(theirs.memory).digest([])
    with pytest.raises(BadMessage):
        BlockDigester(mine.memory).digest([8])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_block_has_its_own_digest_in_any_company(
    layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the blocks do not fit the buffer at once."""
    monkeypatch.setattr(digest, "_STAGE_BYTES", 3 * layout.block_bytes)
    data = random_bytes(extent(layout), 5)
    digester = digest.BlockDigester(memory_over(data, layout))
    ids = scattered(1, 8)
    together = digester.digest(ids)
    assert together == b"".join(digester.digest([block]) for block in ids)
    changed = ids[4]
    pages(data, layout)[-1, changed, -1, -1] ^= 1
    again = digester.digest(ids)
    size = digest.DIGEST_BYTES
    differ = [i for i in range(8) if again[i * size :][:size] != together[i * size :][:size]]
    assert differ == [4]


@given(st.integers(1, 3000), st.binary(min_size=1, max_size=16), st.integers(1, 3))
def test_both_ends_sample_the_same_blocks(count: int, job: bytes, attempt: int) -> None:
    some = digest.sampled(DigestMode.SAMPLE, count, job, attempt)
    assert some == digest.sampled(DigestMode.SAMPLE, count, job, attempt)
    assert some == sorted(set(some))
    assert some[-1] == count - 1, "the last block is always checked"
    assert some[0] >= 0
    assert digest.sampled(DigestMode.FULL, count, job, attempt) == list(range(count))
    assert digest.sampled(DigestMode.OFF, count, job, attempt) == []


def test_a_sample_is_about_one_block_of_sixteen_and_another_each_attempt() -> None:
    draws = [digest.sampled(DigestMode.SAMPLE, 1601, b"job", n) for n in (1, 2, 3)]
    assert len({tuple(draw) for draw in draws}) == 3
    assert all(60 < len(draw) < 150 for draw in draws)


# --------------------------------------------------------------------------- loopback's faults


class Rigged:
    """A loopback region, a session, and a thread that writes."""

    def __init__(self, tmp_path: Path) -> None:
        rig = loopback_rig(tmp_path)
        self.region: Region = rig.region(LAYOUT)
        self.mine = rig.local(LAYOUT)
        self.session = rig.connect(self.mine, self.region)
        assert isinstance(self.region.owner, LoopbackOwner)
        self.owner = self.region.owner
        self.error: PullfillError | None = None

    def write_in_thread(self, blocks: list[int]) -> Callable[[], None]:
        self.token = self.owner.fences.open(blocks)

        def run() -> None:
            try:
                self.session.write_blocks(self.token, blocks, blocks)
            except PullfillError as exc:
                self.error = exc

        thread = threading.Thread(target=run)
        thread.start()
        assert self.owner.faults.wait_held()
        return lambda: thread.join(20)


@pytest.fixture
def rigged(tmp_path: Path) -> Rigged:
    return Rigged(tmp_path)


def test_held_batch_blocks_the_revoke_and_lands_on_resume(rigged: Rigged) -> None:
    rigged.owner.faults.hold()
    before = rigged.region.data.copy()
    join = rigged.write_in_thread([1, 2])
    assert not rigged.owner.fences.try_revoke(rigged.token)
    np.testing.assert_array_equal(rigged.region.data, before)
    rigged.owner.faults.resume()
    join()
    assert rigged.error is None
    np.testing.assert_array_equal(rigged.region.pages[:, 1:3], rigged.mine.pages[:, 1:3])
    assert rigged.owner.fences.try_revoke(rigged.token)


def test_killed_batch_lands_nothing_and_frees_the_fence(rigged: Rigged) -> None:
    rigged.owner.faults.hold()
    before = rigged.region.data.copy()
    join = rigged.write_in_thread([1, 2])
    assert not rigged.owner.fences.try_revoke(rigged.token)
    rigged.owner.faults.kill()
    assert rigged.owner.fences.try_revoke(rigged.token)
    join()
    assert isinstance(rigged.error, TransferFailed)
    np.testing.assert_array_equal(rigged.region.data, before)
    token = rigged.owner.fences.open([3])
    rigged.session.write_blocks(token, [3], [3])  # a later writer is not affected


def test_hold_lets_the_first_batches_pass(rigged: Rigged) -> None:
    rigged.owner.faults.hold(after=1)
    first = rigged.owner.fences.open([0])
    rigged.session.write_blocks(first, [0], [0])
    join = rigged.write_in_thread([1])
    rigged.owner.faults.resume()
    join()


def test_loopback_checks_the_grant(rigged: Rigged) -> None:
    token = rigged.owner.fences.open([1, 2])
    before = rigged.region.data.copy()
    with pytest.raises(BadMessage, match=r"\[3\] are outside"):
        rigged.session.write_blocks(token, [0, 1], [2, 3])
    with pytest.raises(BadMessage):
        rigged.session.read_blocks(token, [0], [0])
    np.testing.assert_array_equal(rigged.region.data, before)
    assert rigged.owner.fences.try_revoke(token)
    with pytest.raises(Fenced):
        rigged.session.write_blocks(token, [0], [2])


def test_loopback_keeps_a_prefix_hit_from_being_written(rigged: Rigged) -> None:
    token = rigged.owner.fences.open([1, 2], 1)
    with pytest.raises(BadMessage, match=r"\[1\] are outside"):
        rigged.session.write_blocks(token, [0, 1], [1, 2])
    rigged.session.read_blocks(token, [1, 2], [0, 1])
    rigged.session.write_blocks(token, [1], [2])
