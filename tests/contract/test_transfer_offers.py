"""What a decode worker offers at once, and what a prefill worker takes of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.decode_worker.side import open_memory
from pullfill.errors import ConfigError
from pullfill.options import WorkerOptions
from pullfill.transfer.connect import choose, why_not_better
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.owners import MappedRank, Owner
from pullfill.transfer.shm.files import RegionFiles, create_kv
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import Commit, RegionDescriptor, StageTimings, decode, encode
from pullfill.worker.context import WorkerContext
from tests.support.transfer_rigs import COMPAT, DENSE, extent


def shared(directory: Path, **options: Any) -> Owner:
    files = RegionFiles("decode-1", directory)
    path = create_kv(directory, "decode-1", 0, extent(DENSE))
    ranks = [MappedRank(LocalMemory(0, extent(DENSE), DENSE), str(path))]
    return Owner(files, ranks, "i1", instance_id="decode-1", **options)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Callable[..., RegionDescriptor]]:
    """Owners that offer shm and tcp, of which `offered` may leave some out."""
    owners: list[Owner] = []

    def build(offered: frozenset[str] | None = None) -> RegionDescriptor:
        owners.append(made := shared(tmp_path, kinds={"tcp": TcpKind()}, offered=offered))
        made.listen("127.0.0.1")
        return made.describe(COMPAT)[0]

    yield build
    for owner in owners:
        owner.close()
    assert list(tmp_path.iterdir()) == []


def test_a_peer_of_another_host_gets_tcp_by_itself(both: Callable[..., RegionDescriptor]) -> None:
    transports = [StreamTransport(TcpKind()), ShmTransport()]
    descriptor = both()
    assert choose(descriptor, transports)[0].name == "shm"
    elsewhere = replace(descriptor, host_id="elsewhere")
    chosen, why_not = choose(elsewhere, transports)
    assert chosen.name == "tcp"
    assert "another host" in dict(why_not)["shm"]
    assert why_not_better(elsewhere, transports, {"nccl": "no GPU"}) == [
        f"shm: {dict(why_not)['shm']}",
        "nccl: no GPU",
    ]


def test_a_reason_of_any_length_fits_a_commit(both: Callable[..., RegionDescriptor]) -> None:
    """What a library says when it cannot be loaded may be pages long; the commit must be read."""
    transports = [StreamTransport(TcpKind())]
    absent = {"nccl": "not installed: " + "x" * 10_000, "shm": "y" * 10_000}
    reasons = why_not_better(both(), transports, absent)
    assert [reason.partition(":")[0] for reason in reasons] == ["shm", "nccl"]
    commit = Commit(
        rid=1, job_id="j", attempt=1, incarnation="i", blocks=1, kv_bytes=1,
        timings=StageTimings(), why_not_better=tuple(reasons),
    )  # fmt: skip
    assert decode(encode(commit), Commit) == commit


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_only_what_was_chosen_is_offered(both: Callable[..., RegionDescriptor], name: str) -> None:
    assert set(both(frozenset({name})).endpoints) == {name}


def test_an_address_to_publish_takes_the_place_of_the_bound_one(tmp_path: Path) -> None:
    owner = shared(tmp_path, kinds={"tcp": TcpKind()})
    assert "tcp" not in owner.endpoints(), "nothing listens yet"
    owner.listen("127.0.0.1", advertise="tcp://10.0.0.1:99")
    assert owner.endpoints()["tcp"] == "tcp://10.0.0.1:99"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="cannot listen"):
            owner.listen("127.0.0.1", taken.getsockname()[1])
    owner.close()
    owner.close()


@pytest.mark.parametrize("asked", [None, frozenset({"cuda_ipc"})])
def test_memory_that_nothing_reaches_is_served_alone_unless_a_transport_was_asked_for(
    tmp_path: Path, asked: frozenset[str] | None
) -> None:
    # GPU memory of a kind that has no IPC handle, on a machine without NCCL.
    memory = LocalMemory(address=1 << 40, nbytes=extent(DENSE), layout=DENSE, device=0)
    parts = WorkerContext("decode-1", RegionFiles("decode-1", tmp_path))
    parts.ranks = [MappedRank(memory)]
    make = partial(open_memory, parts, "", "i1", WorkerOptions(model="m", transports=asked), None)
    if asked is None:
        assert make() is None
    else:
        with pytest.raises(ConfigError, match="none of them reaches"):
            make()
    assert list(tmp_path.iterdir()) == []
