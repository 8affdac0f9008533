"""Both ends of the control channel for tests: the real ones, and raw peers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.forecast import Links
from pullfill.decode_worker.handoff import Handoff
from pullfill.decode_worker.ledger import Entry, Ledger
from pullfill.decode_worker.peers import Peers
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.errors import BadMessage, PeerUnavailable
from pullfill.net.channel import Channel, split_address
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.wire import (
    SILENT_S,
    Commit,
    Grant,
    Hello,
    Revoke,
    StageTimings,
    ToPrefill,
    Welcome,
    WorkerRecord,
)
from tests.support import workers
from tests.support.loopback import LoopbackFences
from tests.support.transfer_rigs import COMPAT
from tests.support.workers import FakeDirectory

BLOCKS = (0, 5, 6)


def handoff_of(
    name: str,
    fences: Any,
    queue: Any,
    *,
    traces: RequestTraces | None = None,
    links: Links | None = None,
    **more: Any,
) -> Handoff:
    """A decode worker's handoff, with a ledger that wakes it. more: arguments of `Ledger`."""
    loop, wake = asyncio.get_running_loop(), asyncio.Event()
    ledger = Ledger(
        fences,
        incarnation="i0",
        on_action=lambda: loop.call_soon_threadsafe(wake.set),
        **more,
    )
    return Handoff(
        ledger, queue, traces or RequestTraces(name), peers=Peers(), links=links or Links(),
        wake=wake,
    )  # fmt: skip


class Decode:
    """One decode worker's control server over a real ledger."""

    def __init__(
        self,
        silent_s: float = SILENT_S,
        key: ClusterKey | None = None,
        name: str = "decode-1",
    ) -> None:
        self.name = name
        self.nakked: list[str] = []
        self.fences = LoopbackFences(8)
        self.handoff = handoff_of(name, self.fences, self)
        self.ledger = self.handoff.ledger
        self.server = ControlServer(
            self.handoff, welcome=lambda: Welcome(decode_instance=name), compat=COMPAT,
            silent_s=silent_s, key=key,
        )  # fmt: skip
        self._raws: list[Raw] = []

    async def raw(self) -> Raw:
        """A bare connection, until `stop`."""
        raw = Raw(*await asyncio.open_connection(*split_address(self.server.address)))
        self._raws.append(raw)
        return raw

    async def stop(self) -> None:
        await self.server.stop()
        for raw in self._raws:
            raw.writer.close()

    # ------------------------------------------------------------------ the queue

    def claimed(self, receipt: object) -> None:
        """Nobody counts."""

    committed = claimed

    async def cancel(self, receipt: object) -> None:
        """Nothing is published."""

    async def nak(self, subject: str, receipt: object) -> None:
        if not subject.startswith("ack"):
            raise BadMessage("not one of ours")
        self.nakked.append(subject)

    def open(self, job_id: str = "j", timeout_s: float = 30.0) -> None:
        self.ledger.open(
            # The wait for a claim begins a moment later, and must not be cut by the deadline.
            Entry(
                job_id, f"r-{job_id}", BLOCKS, 1, timeout_s=timeout_s + 0.02,
                claim_timeout_s=timeout_s,
            )
        )  # fmt: skip
        self.ledger.set_digest(job_id, b"digest")

    def record(self, address: str | None = None) -> WorkerRecord:
        control = address or self.server.address
        return workers.record(self.name, compat=COMPAT, control=control)


class Prefill:
    """One prefill worker's link, and what its job `j` was told.

    more: arguments of `DecodeLinks`."""

    def __init__(
        self,
        decode: Decode,
        name: str = "prefill-1",
        key: ClusterKey | None = None,
        address: str | None = None,
        *,
        says: Hello | None = None,
        **more: Any,
    ) -> None:
        self.revokes: list[Revoke] = []
        self.lost = 0
        self.directory = FakeDirectory()
        self.links = DecodeLinks(
            self.directory,  # type: ignore[arg-type]
            says or hello(name),
            COMPAT,
            self._no_transfer_worker,
            key,
            **more,
        )
        self.links.start()
        self.directory.put(decode.record(address))
        self.link = self.links.links[decode.name]
        self.link.jobs["j"] = self  # type: ignore[assignment]

    def revoke(self, revoke: Revoke) -> None:
        self.revokes.append(revoke)

    def link_lost(self) -> None:
        self.lost += 1

    async def _no_transfer_worker(self, name: str, regions: Any) -> Any:
        raise PeerUnavailable("this test moves nothing")

    async def claim(self, job_id: str = "j", incarnation: str = "i0") -> Grant:
        return await self.link.claim(job_id, incarnation, f"ack.{job_id}")

    async def commit(self, grant: Grant) -> Any:
        message = Commit(
            rid=0, job_id=grant.job_id, attempt=grant.attempt, incarnation=grant.incarnation,
            blocks=2, kv_bytes=10, timings=StageTimings(),
        )  # fmt: skip
        return await self.link.commit(message, 10.0)


class Raw:
    """A peer that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.channel = Channel(reader, writer)

    def say(self, message: msgspec.Struct) -> None:
        self.channel.write(message)

    async def hear(self, kind: Any = ToPrefill) -> Any:
        return await asyncio.wait_for(self.channel.read(kind), 10)

    async def hello(self, compat: str | None = None) -> None:
        self.say(hello(f"raw-{id(self)}", compat))
        assert isinstance(await self.hear(), Welcome)

    async def ended(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), 10) == b""
        except ConnectionError:
            return True
        finally:
            self.writer.close()


def hello(name: str = "raw", compat: str | None = None) -> Hello:
    return Hello(prefill_instance=name, compat=compat or COMPAT.hash())
