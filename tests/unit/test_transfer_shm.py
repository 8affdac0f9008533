"""shm's own parts: locks, files and their sweep, the endpoint, the pool over torch tensors."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pullfill.errors import BadMessage, ConfigError, IncompatibleError, PeerUnavailable
from pullfill.transfer.contract import KvLayout
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.shm import files as files_module
from pullfill.transfer.shm import lock
from pullfill.transfer.shm.files import RegionFiles, ShmEndpoint, open_same, sweep
from pullfill.transfer.shm.pool import SharedKvPool, describe
from tests.support.transfer_rigs import Rig, pages, shm_rig

BLOCKS, HEADS, ROWS, WIDTH, LAYERS = 6, 2, 4, 8, 3


@pytest.fixture
def two_fds(tmp_path: Path) -> Iterator[tuple[int, int]]:
    path = tmp_path / "x"
    path.write_bytes(bytes(64))
    fds = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    yield fds
    for fd in fds:
        os.close(fd)


def test_locks_exclude_by_description_and_range(two_fds: tuple[int, int]) -> None:
    a, b = two_fds
    assert lock.try_exclusive(a, 0, 8)
    assert not lock.try_exclusive(b, 0, 8)
    assert not lock.try_shared(b, 7, 1)
    assert lock.try_exclusive(b, 8, 8)
    lock.unlock(a, 0, 8)
    assert lock.try_shared(a, 0, 8)
    assert lock.try_shared(b, 0, 8)
    assert not lock.try_exclusive(a, 0, 8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock.try_shared(-1, 0, 1)


def test_a_live_name_is_not_taken_twice(tmp_path: Path) -> None:
    first = RegionFiles("decode-a", 0, tmp_path)
    with pytest.raises(ConfigError, match="running worker"):
        RegionFiles("decode-a", 0, tmp_path)
    other = RegionFiles("decode-a", 1, tmp_path)
    assert first.create_kv(4096).stat().st_mode & 0o777 == 0o600
    assert first.fence_path.stat().st_mode & 0o777 == 0o600
    first.close()
    first.close()
    assert os.listdir(tmp_path) == [other.fence_path.name]
    RegionFiles("decode-a", 0, tmp_path).close()
    other.close()


def test_sweep_takes_orphans_and_only_those(tmp_path: Path) -> None:
    live = RegionFiles("decode-live", 0, tmp_path)
    live.create_kv(4096)
    for name in ("pullfill-dead-0.fence", "pullfill-dead-0.kv", "pullfill-alone-0.kv"):
        (tmp_path / name).write_bytes(b"x")
    for name in ("someone.kv", "pullfill-notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "pullfill-link-0.fence").symlink_to(tmp_path / "someone.kv")
    removed = sweep(tmp_path)
    assert sorted(removed) == ["pullfill-alone-0.kv", "pullfill-dead-0.fence", "pullfill-dead-0.kv"]
    assert (tmp_path / "someone.kv").exists()
    assert live.kv_path.exists()
    live.close()


def test_a_file_swept_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = lock.try_exclusive, []

    def sweeper_wins_once(fd: int, start: int, length: int) -> bool:
        calls.append(fd)
        if len(calls) == 1:
            os.unlink(tmp_path / "pullfill-decode-a-0.fence")
        return real(fd, start, length)

    monkeypatch.setattr(files_module.lock, "try_exclusive", sweeper_wins_once)
    made = RegionFiles("decode-a", 0, tmp_path)
    assert len(calls) == 2
    assert os.fstat(made.fence_fd).st_nlink == 1
    made.close()


def test_too_small_a_directory_is_refused_before_sigbus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    made = RegionFiles("decode-a", 0, tmp_path)
    with pytest.raises(ConfigError, match="PULLFILL_SHM_DIR"):
        made.create_kv(2 * free)
    # What another sparse region may still grow into counts as used.
    other = RegionFiles("decode-b", 0, tmp_path)
    other.create_kv(free * 2 // 3)
    with pytest.raises(ConfigError, match="MiB left"):
        made.create_kv(free * 2 // 3)
    made.close()
    other.close()
    with pytest.raises(ConfigError, match="cannot use"):
        RegionFiles("decode-a", 0, tmp_path / "missing")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "/dev/shm/x", ShmEndpoint.__name__, '{"v":1,"kv":3}']
)
def test_bad_endpoints_are_bad_messages(text: str) -> None:
    with pytest.raises(BadMessage):
        ShmEndpoint.decode(text)


def test_endpoint_round_trip_and_version() -> None:
    endpoint = ShmEndpoint(kv="a", kv_inode=(1, 2), fence="b", fence_inode=(1, 3), nbytes=4)
    assert ShmEndpoint.decode(endpoint.encode()) == endpoint
    with pytest.raises(BadMessage, match="version"):
        ShmEndpoint.decode(endpoint.encode().replace('"v":1', '"v":2'))


def test_only_the_very_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "pullfill-decode-1-0.kv"
    path.write_bytes(b"x")
    info = path.stat()
    os.close(open_same(str(path), (info.st_dev, info.st_ino)))
    with pytest.raises(FileNotFoundError, match="another file"):
        open_same(str(path), (info.st_dev, info.st_ino + 1))
    link, fifo, other = (tmp_path / f"pullfill-{n}-0.kv" for n in ("link", "fifo", "other"))
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_same(str(link))
    os.mkfifo(fifo)
    with pytest.raises(PermissionError):
        open_same(str(fifo))
    path.rename(tmp_path / "authorized_keys")
    with pytest.raises(PermissionError, match="not the path of a region"):
        open_same(str(tmp_path / "authorized_keys"))
    other.write_bytes(b"x")
    with other.open() as file, pytest.raises(PermissionError, match="has a name"):
        open_same(f"/proc/{os.getpid()}/fd/{file.fileno()}")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return shm_rig(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"x" * 4096, struct.pack("<8sQ", b"pfFENCE1", 1 << 40)])
def test_damaged_fence_files_are_refused(rig: Rig, damage: bytes, tmp_path: Path) -> None:
    layout = dense_layout(1, 4, 1, 64)
    region, mine = rig.region(layout), rig.local(layout)
    fence = tmp_path / "pullfill-decode-1-0.fence"
    if damage:
        with fence.open("r+b") as file:
            file.write(damage)
    else:
        os.truncate(fence, 0)
    with pytest.raises(PeerUnavailable):
        rig.connect(mine, region)
    if not damage:
        os.truncate(fence, 4096 + 64 * 64)
    region.owner.close()


def test_other_hosts_are_out_of_reach(rig: Rig) -> None:
    layout = dense_layout(1, 4, 1, 64)
    region, mine = rig.region(layout), rig.local(layout)
    assert rig.transport.can_reach(region.descriptor) is None
    with pytest.raises(PeerUnavailable, match="host"):
        rig.connect(mine, region, host_id="elsewhere")
    region.owner.close()


# --------------------------------------------------------------------------- the pool


def views(buffer: torch.Tensor, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """float32 [B, H, N, C] views of one flat int8 buffer, as vLLM makes them for LBHNC."""
    page = ROWS * WIDTH
    size = (layers, BLOCKS, HEADS, ROWS, WIDTH)
    stride = (BLOCKS * HEADS * page, HEADS * page, page, WIDTH, 1)
    whole = torch.as_strided(buffer.view(torch.float32), size, stride)
    return {f"layers.{i}": whole[i] for i in range(layers)}


NBYTES = LAYERS * BLOCKS * HEADS * ROWS * WIDTH * 4


def test_pool_backs_the_big_allocation_with_the_file(tmp_path: Path) -> None:
    pool = SharedKvPool("decode-a", 0, tmp_path)
    with pool:
        other = torch.zeros(8, dtype=torch.int64, device="cpu")
        small = torch.zeros((2, 2), dtype=torch.int8)
        assert not pool.fired
        buffer = torch.zeros(NBYTES, dtype=torch.int8, device=torch.device("cpu"))
        assert pool.fired
        second = torch.zeros(NBYTES, dtype=torch.int8, device="cpu")
    assert (other.sum(), small.sum(), int(buffer.sum())) == (0, 0, 0)
    assert buffer.shape == (NBYTES,)
    assert second.data_ptr() != buffer.data_ptr()
    caches = views(buffer)
    caches["layers.0-again"] = caches["layers.0"]  # a layer that reuses another's cache
    owner, memory = pool.make_owner(caches, "i1", BLOCKS)
    assert memory.layout == dense_layout(LAYERS, BLOCKS, HEADS, ROWS * WIDTH * 4)
    assert (memory.address, memory.nbytes) == (buffer.data_ptr(), NBYTES)
    caches["layers.1"][3, 1] = 7.5
    in_file = np.fromfile(tmp_path / "pullfill-decode-a-0.kv", np.float32)
    assert set(pages(in_file.view(np.uint8), memory.layout)[1, 3, 1].view(np.float32)) == {7.5}
    assert int((in_file != 0).sum()) == ROWS * WIDTH
    pool.close()
    assert sorted(os.listdir(tmp_path)) == ["pullfill-decode-a-0.fence", "pullfill-decode-a-0.kv"]
    owner.close()
    assert os.listdir(tmp_path) == []
    caches["layers.1"][3, 1] += 1  # the engine's mapping lives on
    assert float(caches["layers.1"][3, 1, 0, 0]) == 8.5


def test_pool_that_did_not_fire_moves_the_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SharedKvPool("decode-a", 0, tmp_path)
    buffer = torch.zeros(NBYTES, dtype=torch.int8)
    caches = views(buffer)
    caches["layers.2"][5, 0] = 3.25
    owner, memory = pool.make_owner(caches, "i1")
    assert "moving" in caplog.text
    endpoint = ShmEndpoint.decode(owner.endpoints()["shm"])
    fd = open_same(endpoint.kv, endpoint.kv_inode)
    seen = pages(np.frombuffer(os.pread(fd, NBYTES, 0), np.uint8), memory.layout)
    assert set(seen[2, 5, 0].view(np.float32)) == {3.25}
    caches["layers.0"][1, 1] = 2.0  # old views write into the shared pages
    now = pages(np.frombuffer(os.pread(fd, NBYTES, 0), np.uint8), memory.layout)
    assert set(now[0, 1, 1].view(np.float32)) == {2.0}
    assert ctypes.string_at(memory.address, 4) == bytes(4)
    os.close(fd)
    owner.close()
    pool.close()
    pool.close()
    assert os.listdir(tmp_path) == []


def test_unused_pool_leaves_nothing(tmp_path: Path) -> None:
    SharedKvPool("decode-a", 0, tmp_path).close()
    assert os.listdir(tmp_path) == []


def test_describe_reads_strides_and_offset() -> None:
    page = ROWS * WIDTH
    buffer = torch.zeros(4096, dtype=torch.float32)
    padded = torch.as_strided(
        buffer, (2, BLOCKS, HEADS, ROWS, WIDTH), (1000, 100, 40, WIDTH, 1), 10
    )
    memory = describe({"a": padded[0], "b": padded[1]}, BLOCKS)
    assert memory.layout == KvLayout(
        base_offset=40,
        num_layers=2,
        num_blocks=BLOCKS,
        num_kv_heads=HEADS,
        page_bytes=page * 4,
        layer_stride=4000,
        block_stride=400,
        head_stride=160,
    )
    assert (memory.address, memory.nbytes) == (buffer.data_ptr(), 4096 * 4)


def _broken(make: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, torch.Tensor]:
    caches = views(torch.zeros(NBYTES, dtype=torch.int8))
    make(caches)
    return caches


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda c: c.clear(), "num_layers"),
        (lambda c: c.update(x=torch.zeros(4)), "layout"),
        (lambda c: c.update({"layers.0": c["layers.0"].transpose(2, 3)}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"].transpose(1, 2)}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"][:3]}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"].view(torch.int32)}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"].clone()}), "layer_stride"),
        (lambda c: c.update({"layers.1": c["layers.0"][:]}), "layer_stride"),
        (lambda c: [c.popitem(), c.popitem(), c.update(z=c["layers.0"][:])], "layer_stride"),
        (lambda c: c.update({"layers.0": c["layers.0"].to("meta")}), "device"),
    ],
)
def test_describe_names_what_is_off(
    make: Callable[[dict[str, torch.Tensor]], object], field: str
) -> None:
    with pytest.raises(IncompatibleError) as caught:
        describe(_broken(make))
    assert caught.value.field == field


def test_describe_refuses_split_blocks() -> None:
    with pytest.raises(IncompatibleError, match="--block-size") as caught:
        describe(_broken(lambda c: None), BLOCKS // 2)
    assert caught.value.field == "block_size"
