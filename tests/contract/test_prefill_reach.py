"""Reaching a decode worker's KV memory: whatever is wrong there is the worker's, and no job's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from msgspec.structs import replace

from pullfill.errors import PeerUnavailable
from pullfill.prefill_worker.reach import MAX_RANKS, open_transfer_worker
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import RegionDescriptor, WorkerRecord, WorkerState
from tests.support.handoff_rig import COMPATIBLE
from tests.support.transfer_rigs import DENSE, tcp_rig

RECORD = WorkerRecord(
    instance_id="decode-1", incarnation="i0", role="decode", state=WorkerState.READY, model="m",
    host="127.0.0.1", host_id="h", pid=1, started_at=0.0,
)  # fmt: skip


class Registry:
    """A `Directory` as far as descriptors go."""

    def __init__(self, *descriptors: RegionDescriptor) -> None:
        self._descriptors = descriptors

    async def descriptor(self, name: str, rank: int, *, expect: object) -> RegionDescriptor:
        return self._descriptors[rank]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[list[LocalMemory], RegionDescriptor]]:
    """A prefill worker's memory, and a decode worker's that is served over tcp."""
    rig = tcp_rig(tmp_path)
    region, rank = rig.region(DENSE), rig.local(DENSE)
    yield [rank.memory], region.descriptor
    region.owner.close()


async def opened(memories: list[LocalMemory], *descriptors: RegionDescriptor) -> Any:
    directory: Any = Registry(*descriptors)
    transports = [StreamTransport(TcpKind())]
    return await open_transfer_worker(
        RECORD, memories=memories, directory=directory, compat=COMPATIBLE, transports=transports,
        absent={}, credits=Credits(1 << 30), copiers=WeakSet(),
    )  # fmt: skip


async def test_what_is_right_is_reached(served: tuple[list[LocalMemory], RegionDescriptor]) -> None:
    transfer_worker = await opened(*served)
    assert transfer_worker.transport == "tcp"
    transfer_worker.close()
    assert transfer_worker.join(10)


@pytest.mark.parametrize(
    "wrong",
    [{"nbytes": 64}, {"incarnation": "before"}, {"world_size": MAX_RANKS + 1}],
    ids=["nbytes", "incarnation", "world_size"],
)
async def test_a_descriptor_that_contradicts_itself_or_its_worker(
    served: tuple[list[LocalMemory], RegionDescriptor], wrong: dict[str, Any]
) -> None:
    memories, descriptor = served
    with pytest.raises(PeerUnavailable):
        await opened(memories, replace(descriptor, **wrong))
