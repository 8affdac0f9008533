"""shm's own parts: locks, files and their sweep, the endpoint."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pullfill.errors import ConfigError, Fenced, PeerUnavailable
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.shm import fence, lock
from pullfill.transfer.shm.files import RegionFiles, create_kv, open_same, sweep
from pullfill.wire import FenceToken
from tests.support.loopback import LoopbackFences
from tests.support.transfer_rigs import Rig, shm_rig


def test_a_lock_that_cannot_be_taken_or_let_go_is_no_fence(tmp_path: Path) -> None:
    region = shm_rig(tmp_path).region(dense_layout(1, 4, 1, 64))
    fd = os.open(tmp_path / "pullfill-decode-1.fence", os.O_RDWR)
    hold = fence.ShmHold(fd, "i1")
    token = region.owner.fences.open([1])
    hold.enter(token)
    spare = os.dup(fd)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        hold.leave(token)
    with pytest.raises(OSError, match="Bad file descriptor"):
        hold.enter(token)
    os.dup2(spare, fd)
    os.close(spare)
    hold.close()
    region.owner.close()


def test_nobody_waits_for_an_owner_that_is_stopped_in_a_revoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker's engine may stand here. An old token's slot may be a later grant's."""
    fences = shm_rig(tmp_path).region(dense_layout(1, 4, 1, 64)).owner.fences
    hold = fence.ShmHold(os.open(tmp_path / "pullfill-decode-1.fence", os.O_RDWR), "i1")
    old = fences.open([1])
    assert fences.try_revoke(old)
    token = fences.open([1])
    assert token.slot == old.slot
    refused: list[FenceToken] = []

    def holds_the_slot(*_: object) -> bool:
        for each in (token, old):
            with pytest.raises(Fenced):
                hold.enter(each)
            refused.append(each)
        return True

    monkeypatch.setattr(fence.writers, "quiet", holds_the_slot)
    assert fences.try_revoke(token)
    assert refused == [token, old]
    hold.close()


def test_who_is_too_late_by_a_moment_keeps_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock would keep every later grant of the slot from being revoked."""
    fences, real = LoopbackFences(1), lock.try_shared
    token = fences.open([1])

    def revoked_first(*args: int) -> bool:
        assert fences.try_revoke(token)
        return real(*args)

    monkeypatch.setattr(lock, "try_shared", revoked_first)
    hold = fences.open_hold("i")
    with pytest.raises(Fenced):
        hold.enter(token)
    assert fences.try_revoke(fences.open([1]))
    hold.close()


def test_an_error_of_the_kernel_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fences = LoopbackFences(2)
    token = fences.open([1])
    no_memory = Mock(side_effect=OSError(37, "no locks available"))
    monkeypatch.setattr(lock, "try_exclusive", no_memory)
    assert not fences.try_revoke(token)
    monkeypatch.undo()
    assert fences.in_use == 1
    assert fences.try_revoke(token)


def test_a_live_name_is_not_taken_twice(tmp_path: Path) -> None:
    first = RegionFiles("decode-a", tmp_path)
    with pytest.raises(ConfigError, match="running worker"):
        RegionFiles("decode-a", tmp_path)
    other = RegionFiles("decode-a-1", tmp_path)
    theirs = create_kv(tmp_path, "decode-a-1", 0, 4096)
    for rank in (0, 1, 12):
        assert create_kv(tmp_path, "decode-a", rank, 4096).stat().st_mode & 0o777 == 0o600
    assert first.fence_path.stat().st_mode & 0o777 == 0o600
    first.close()
    first.close()
    assert sorted(os.listdir(tmp_path)) == [theirs.name, other.fence_path.name]
    RegionFiles("decode-a", tmp_path).close()
    assert theirs.exists(), "an instance whose name begins alike"
    other.close()


def test_sweep_takes_orphans_and_only_those(tmp_path: Path) -> None:
    live = RegionFiles("decode-live", tmp_path)
    kvs = [create_kv(tmp_path, "decode-live", rank, 4096) for rank in (0, 1)]
    orphans = {"dead.fence", "dead-0.kv", "dead-1.kv", "alone-0.kv"}
    for name in orphans:
        (tmp_path / f"pullfill-{name}").write_bytes(b"x")
    for name in ("someone.kv", "pullfill-notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "pullfill-link.fence").symlink_to(tmp_path / "someone.kv")
    assert set(sweep(tmp_path)) == {f"pullfill-{name}" for name in orphans}
    assert (tmp_path / "someone.kv").exists()
    assert all(kv.exists() for kv in kvs)
    live.close()


def test_files_are_locked_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a sweeper that comes in between removes them. Ranks may make theirs before the fence."""
    swept: list[list[str]] = []
    link = os.link

    def link_and_sweep(*args: Any, **options: Any) -> None:
        link(*args, **options)
        swept.append(sweep(tmp_path))

    monkeypatch.setattr(os, "link", link_and_sweep)
    kv = create_kv(tmp_path, "decode-a", 0, 4096)
    made = RegionFiles("decode-a", tmp_path)
    assert swept == [[], []]
    assert sorted(os.listdir(tmp_path)) == [kv.name, "pullfill-decode-a.fence"]
    made.close()
    assert os.listdir(tmp_path) == []


def test_a_late_sweeper_does_not_take_the_next_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opened the orphan, another sweeper removed it, and a worker made its own since then."""
    path = tmp_path / "pullfill-decode-a.fence"
    path.write_bytes(b"x")
    made: list[RegionFiles] = []
    real = os.open

    def open_and_take_the_name(path_: str, flags: int, *mode: int) -> int:
        fd = real(path_, flags, *mode)
        monkeypatch.undo()
        path.unlink()
        made.append(RegionFiles("decode-a", tmp_path))
        return fd

    monkeypatch.setattr(os, "open", open_and_take_the_name)
    assert sweep(tmp_path) == []
    assert path.exists()
    made[0].close()


def test_too_small_a_directory_is_refused_before_sigbus(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    made = RegionFiles("decode-a", tmp_path)
    with pytest.raises(ConfigError, match="PULLFILL_SHM_DIR"):
        create_kv(tmp_path, "decode-a", 0, 2 * free)
    # What another sparse region may still grow into counts as used.
    other = RegionFiles("decode-b", tmp_path)
    create_kv(tmp_path, "decode-b", 0, free * 2 // 3)
    with pytest.raises(ConfigError, match="MiB left"):
        create_kv(tmp_path, "decode-a", 0, free * 2 // 3)
    made.close()
    other.close()
    with pytest.raises(ConfigError, match="cannot use"):
        RegionFiles("decode-a", tmp_path / "missing")


def test_only_the_very_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "pullfill-decode-1-0.kv"
    path.write_bytes(b"x")
    info = path.stat()
    os.close(open_same(str(path), (info.st_dev, info.st_ino)))
    with pytest.raises(FileNotFoundError, match="another file"):
        open_same(str(path), (info.st_dev, info.st_ino + 1))
    link, fifo = (tmp_path / f"pullfill-{n}-0.kv" for n in ("link", "fifo"))
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_same(str(link))
    os.mkfifo(fifo)
    with pytest.raises(PermissionError):
        open_same(str(fifo))
    path.rename(tmp_path / "authorized_keys")
    with pytest.raises(PermissionError, match="not the path of a region"):
        open_same(str(tmp_path / "authorized_keys"))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return shm_rig(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"x" * 4096, struct.pack("<8sQ", b"pfFENCE1", 1 << 40)])
def test_damaged_fence_files_are_refused(rig: Rig, damage: bytes, tmp_path: Path) -> None:
    layout = dense_layout(1, 4, 1, 64)
    region, mine = rig.region(layout), rig.local(layout)
    fence = tmp_path / "pullfill-decode-1.fence"
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
