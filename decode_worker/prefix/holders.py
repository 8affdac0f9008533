"""Connections to other decode workers, to read from their prefix caches (read_leases.py).

    use         connect to a holder, unless we are connected
    lease       ask it for a lease of cached blocks
    read        copy these blocks, on the thread of the holder's reader (kv_reader.py)
    end_lease   give it back. The answer says whether the copy counts

A connection is made when it is first needed. It is closed after IDLE_S without use, and after any
failure. A holder that failed is not asked for a while. asyncio thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pullfill.decode_worker.kv_reader import KvReader, Reach
from pullfill.errors import BadMessage, HandoffError, PeerUnavailable, PullfillError
from pullfill.net.peer_link import NotInTime, PeerLink
from pullfill.net.security import ClusterKey
from pullfill.runtime import log
from pullfill.wire import (
    Lease,
    LeaseAsk,
    LeaseEnd,
    LeaseEnded,
    LeaseHello,
    NoLease,
    PrefixHolder,
    ToAsker,
    Welcome,
)

logger = log.get("decode_worker.holders")

# The most time for a connection and for the answer to `end`: no prompt waits longer for what
# computing would soon have given. A holder that was slow is not asked for as long.
AGAIN_S = 2.0
# How long a holder is not asked that cannot be reached, or at which a read broke off.
FAILED_S = 15.0
# A read that is too slow is interrupted once more after this time.
_INTERRUPT_S = 0.25


class LeaseRefused(HandoffError):
    """The holder gave no lease. reason: see `NoLease`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Holder(PeerLink):
    """One connection to one holder. Made by `Holders.use`.

    reader: reads its KV memory, from the welcome on."""

    heard = ToAsker
    reader: KvReader

    def __init__(
        self,
        at: PrefixHolder,
        hello: LeaseHello,
        key: ClusterKey | None,
        reach: Reach,
        readers: set[KvReader],
    ) -> None:
        super().__init__(at.instance_id, at.control, hello, key, dial_s=AGAIN_S)
        self._reach = reach
        self._readers = readers
        self._reads = 0

    def on_welcome(self, welcome: Welcome) -> None:
        open_session = self._reach(welcome.regions)
        self.reader = KvReader(self.name, open_session, self._readers)

    def on_unwanted(self, answer: Any) -> None:
        if isinstance(answer, Lease):
            self.forget(answer)  # it came too late

    def on_lost(self) -> None:
        # A read under way goes on. The holder's fence says whether it may.
        self.reader.leave()

    def needed(self) -> bool:
        return self._reads > 0

    async def lease(self, make: Callable[[int], LeaseAsk], within_s: float) -> Lease:
        """Return a lease. Raises LeaseRefused, PeerUnavailable.

        make: makes the message with a given request id."""
        reply = await self.ask(make, within_s)
        if isinstance(reply, NoLease):
            raise LeaseRefused(f"{self.name}: {reply.reason}", reason=reply.reason)
        if not isinstance(reply, Lease):
            raise BadMessage("no answer to lease_ask")
        return reply

    async def read(
        self,
        lease: Lease,
        source: Sequence[int],
        target: Sequence[int],
        wanted: Callable[[], bool],
        within_s: float,
    ) -> tuple[int, float, str]:
        """Copy leased blocks into ours. See `KvReader.read`. It must not be cancelled.

        within_s: a copy that takes longer is interrupted. If it has not begun by then, it never
        begins. Then LeaseRefused is raised if other reads from this holder come first, and
        NotInTime if the KV session is not open."""
        begun = late = False

        # It runs on the reader's thread. It sets `begun` before it reads `late`, and we do the
        # reverse. So no copy begins unseen.
        def begin() -> bool:
            nonlocal begun
            begun = self.reader.connected  # before that, nothing touches the target blocks
            return not late and wanted()

        reading = asyncio.create_task(self.reader.read(lease.fence, source, target, begin))
        self._reads += 1
        try:
            await asyncio.wait([reading], timeout=within_s)
            late = True
            if not (begun or reading.done()):
                reading.cancel()
                if not self.reader.connected:
                    raise NotInTime(f"the KV session to {self.name} is not open in time")
                raise LeaseRefused(f"{self.name}: other reads took long", reason="busy")
            while not reading.done():  # again and again: the copy may just not have begun
                self.reader.interrupt()
                await asyncio.wait([reading], timeout=_INTERRUPT_S)
            return reading.result()
        finally:
            self._reads -= 1

    async def end_lease(self, lease: Lease) -> bool:
        """Give a lease back. Returns whether it was valid until now. Raises PeerUnavailable."""
        reply = await self.ask(lambda rid: LeaseEnd(rid=rid, lease=lease.lease), AGAIN_S)
        return isinstance(reply, LeaseEnded) and reply.valid

    def forget(self, lease: Lease) -> None:
        """Give back a lease that is not wanted, without waiting for the answer."""
        self.send(LeaseEnd(rid=0, lease=lease.lease))


@dataclass(eq=False, repr=False)
class Holders:
    """Makes, keeps and closes the connections to all holders."""

    hello: LeaseHello  # the first message of a connection
    reach: Reach  # opens another worker's KV memory for reading
    key: ClusterKey | None  # a holder must hold the same one
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _links: dict[str, Holder] = field(init=False, default_factory=dict)
    # When each holder that failed may be asked again, by the loop's clock.
    _not_before: dict[str, float] = field(init=False, default_factory=dict)
    _readers: set[KvReader] = field(init=False, default_factory=set)
    _closed: bool = field(init=False, default=False)

    def away(self, instance_id: str) -> bool:
        """Whether this holder failed lately. Any thread."""
        return self._loop.time() < self._not_before.get(instance_id, 0.0)

    async def use(self, at: PrefixHolder) -> Holder:
        """Return a connection to a holder. Raises PeerUnavailable."""
        if self._closed:
            raise PeerUnavailable("this worker is leaving")
        link = self._links.get(at.instance_id)
        if link is None or link.over:
            if self.away(at.instance_id):
                raise PeerUnavailable(f"{at.instance_id} could not be asked just now")
            self._links = {name: one for name, one in self._links.items() if not one.over}
            link = Holder(at, self.hello, self.key, self.reach, self._readers)
            self._links[at.instance_id] = link
        try:
            await link.wait_up(AGAIN_S)
        except PullfillError as exc:
            self.failed(at.instance_id)
            why = f"cannot ask {at.instance_id} for its prefix cache: {exc}"
            logger.info(why)
            raise PeerUnavailable(why) from exc
        return link

    def failed(self, instance_id: str) -> None:
        """Close the connection to this holder, and do not ask it for FAILED_S."""
        self.pause(instance_id, FAILED_S)
        if (link := self._links.get(instance_id)) is not None:
            link.end()

    def pause(self, instance_id: str, pause_s: float) -> None:
        """Do not ask this holder for so long."""
        now = self._loop.time()
        paused = {name: until for name, until in self._not_before.items() if until > now}
        self._not_before = paused | {instance_id: now + pause_s}

    async def close(self) -> None:
        """End all connections, and wait for the reads under way. Nothing is read afterwards."""
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links.values()))
        for reader in list(self._readers):
            await asyncio.to_thread(reader.close)
