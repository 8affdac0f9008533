"""Bytes that come through etcd, NATS, files and descriptors: the documented error or a value."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from pullfill.config import CLUSTER_FILE, read_cluster_file
from pullfill.errors import BadMessage, ConfigError, PeerUnavailable
from pullfill.net.security import load
from pullfill.registry import keys, live_settings
from pullfill.registry.client import read_failure
from pullfill.registry.directory import decode_worker_record
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.layout import dense_layout, layout_of
from pullfill.transfer.shm.files import ShmEndpoint
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.wire import RegionDescriptor, RouterConfig, WorkerRecord
from pullfill.wire.codec import encode
from tests.support.fuzz import EXAMPLES, explore, mutated
from tests.support.transfer_rigs import extent
from tests.support.wire_examples import example

TEXT = st.one_of(
    st.text(max_size=60),
    st.text("0123456789.$JSACKprefill-*>: /\\", max_size=80),
    st.integers(-(2**70), 2**70).map(str),
)


@EXAMPLES
def test_registry_keys_and_values(examples: int) -> None:
    record = example(WorkerRecord)
    prefix = keys.record("ns", "workers").encode()
    good = [
        encode(record),
        b'{"policy":"always_local"}',
        b'{"remote_timeout_s":1e999}',
        b'{"policy":"\x80"}',
    ]

    def check(key: bytes, value: bytes) -> None:
        for name in (key, prefix + key, prefix + b"decode/" + key):
            with contextlib.suppress(BadMessage):
                decode_worker_record("ns", name, value)
        with contextlib.suppress(ConfigError):
            live_settings.parse(value, RouterConfig)
        live_settings.stored(value)
        read_failure(value)

    explore(examples, check, key=st.binary(max_size=60), value=mutated(good))


_NUMBER = st.one_of(st.integers(0, 5), st.integers(0, 2**20), st.integers(0, 2**64 - 1))
_GEOMETRY = (
    "base_offset", "num_layers", "num_blocks", "num_kv_heads", "page_bytes", "layer_stride",
    "block_stride", "head_stride", "nbytes",
)  # fmt: skip


@EXAMPLES
def test_what_a_descriptor_allows_lies_inside_the_region(examples: int) -> None:
    base = example(RegionDescriptor)

    def check(numbers: list[int]) -> None:
        described = msgspec.structs.replace(base, **dict(zip(_GEOMETRY, numbers, strict=True)))
        try:
            layout = layout_of(described)
        except BadMessage:
            return
        assert 0 <= layout.base_offset < extent(layout) <= described.nbytes

    size = len(_GEOMETRY)
    explore(examples * 5, check, numbers=st.lists(_NUMBER, min_size=size, max_size=size))


def _endpoint(kv: Path | str, fence: Path | str, **changes: object) -> str:
    def inode(path: Path | str) -> tuple[int, int]:
        try:
            info = os.stat(path)
        except (OSError, ValueError):
            return (0, 0)
        return info.st_dev, info.st_ino

    fields: dict[str, Any] = {
        "kv": str(kv), "kv_inode": inode(kv), "fence": str(fence), "fence_inode": inode(fence),
        "nbytes": 4096, **changes,
    }  # fmt: skip
    return ShmEndpoint(**fields).encode()


def test_an_endpoint_opens_no_other_file_than_a_region(tmp_path: Path) -> None:
    """Whoever can write to the registry names paths: none of them may be written to or believed
    unless it is a region file, in the directory of regions, of this user."""
    from pullfill.net.this_host import host_id

    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 8192)
    link = tmp_path / "pullfill-decode-0.kv"
    link.symlink_to(victim)
    base = example(RegionDescriptor)
    mine = LocalMemory(0, 4096, dense_layout(1, 1, 1, 64))
    for path in (
        victim,
        link,
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/mem",
        str(tmp_path),
        "",
        "x\0",
    ):
        described = msgspec.structs.replace(
            base, host_id=host_id(), nbytes=4096, base_offset=0, first_head=0, first_layer=0,
            num_layers=1, num_blocks=1, num_kv_heads=1, page_bytes=64, layer_stride=64,
            block_stride=64, head_stride=64,
            endpoints={"shm": _endpoint(path, path)},
        )  # fmt: skip
        with pytest.raises((PeerUnavailable, BadMessage)):
            ShmTransport().connect(mine, described)
        assert ShmTransport().can_reach(described) is not None, path
    assert victim.read_bytes() == b"v" * 8192


@EXAMPLES
def test_files_of_the_state_directory_and_the_security_file(examples: int, tmp_path: Path) -> None:
    good = [
        b'{"namespace":"n","nats_url":"q","etcd_url":"e","frontend_url":"","processes":[]}',
        b'{"namespace":"\x80"',
        b'[nats]\nuser = "u"\npassword_file = "p"\n',
        b'[cluster]\nkey_file = "security.toml"\n',
    ]

    def check(data: bytes) -> None:
        for name in (CLUSTER_FILE, "security.toml"):
            (tmp_path / name).write_bytes(data)
        (tmp_path / "security.toml").chmod(0o600)
        for read in (lambda: read_cluster_file(tmp_path), lambda: load(tmp_path / "security.toml")):
            try:
                read()
            except ConfigError as exc:
                said = str(exc)
                assert "\n" not in said

    explore(examples, check, data=mutated(good))
