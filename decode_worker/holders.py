"""Connections to other decode workers, to read from their prefix caches (read_leases.py).

    use      connect to a holder, unless we are connected
    ask      ask it for a lease of cached blocks
    read     copy these blocks, in the lane of the holder's reader (kv_reader.py)
    end      give the lease back. The answer says whether the copy counts

A connection is made when it is first needed. It is closed after IDLE_S without use, and after any
failure. A holder that failed is not asked for AGAIN_S, and twice as long after each further
failure. A holder that only did not answer in time keeps its connection, and is not asked for
AGAIN_S.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from pullfill.backoff import Backoff
from pullfill.decode_worker.kv_reader import KvReader, Reach
from pullfill.errors import BadMessage, HandoffError, PeerUnavailable, PullfillError
from pullfill.net import frames
from pullfill.net.channel import Channel, introduce
from pullfill.net.replies import Replies
from pullfill.net.security import ClusterKey
from pullfill.runtime import log
from pullfill.runtime.idle import IDLE_S, IdleTimer
from pullfill.transfer.contract import MoveResult
from pullfill.wire import (
    Goodbye,
    Lease,
    LeaseAsk,
    LeaseEnd,
    LeaseEnded,
    LeaseHello,
    LeaseWelcome,
    NoLease,
    PrefixHolder,
    ToAsker,
)

logger = log.get("decode_worker.holders")

CONNECT_S = 2.0
END_S = 2.0
"""How long a holder may take to say whether a lease was valid."""
AGAIN_S, AGAIN_MOST_S = 2.0, 60.0
"""Least and most time for which a holder that failed is not asked."""
_INTERRUPT_S = 0.25
"""Pause before a read that is too slow is interrupted once more."""
MOST = 1024
"""When so many holders are remembered, those without a connection are forgotten."""


class LeaseRefused(HandoffError):
    """The holder gave no lease. reason: see `NoLease`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotInTime(PeerUnavailable):
    """The holder has not answered in time, but its connection is open."""


class Holder:
    """One connection to one holder. Made by `Holders.use`."""

    def __init__(self, instance_id: str, channel: Channel, reader: KvReader) -> None:
        self.instance_id = instance_id
        self.reader = reader
        self._channel = channel
        self._rids = itertools.count(1)
        self._replies = Replies(self._unwanted)
        self.lost = False

    async def ask(self, make: Callable[[int], LeaseAsk], within_s: float) -> Lease:
        """Return a lease. Raises LeaseRefused, PeerUnavailable.

        make: makes the message with a given request id."""
        reply = await self._ask(make, within_s)
        if isinstance(reply, NoLease):
            raise LeaseRefused(f"{self.instance_id}: {reply.reason}", reason=reply.reason)
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
    ) -> tuple[MoveResult, str]:
        """Copy leased blocks into ours. See `KvReader.read`.

        within_s: a copy that takes longer is interrupted. If it has not begun by then, it never
        begins. Then LeaseRefused is raised if other reads from this holder come first, and
        NotInTime if the KV session is not open."""
        loop, begun, late = asyncio.get_running_loop(), False, False
        timer = loop.call_later(within_s, lambda: end_it())

        # `begin` runs in the lane, `end_it` here. Each sets its own flag before it reads the other
        # one. So no copy begins unseen.
        def begin() -> bool:
            nonlocal begun
            begun = self.reader.connected  # before that, nothing touches the target blocks
            return not late and wanted()

        def end_it() -> None:
            nonlocal late, timer
            late = True
            if not begun:
                reading.cancel()
                return
            self.reader.interrupt()
            timer = loop.call_later(_INTERRUPT_S, end_it)  # the copy may just not have begun

        reading = loop.create_task(self.reader.read(lease.fence, source, target, begin))
        try:
            return await reading
        except asyncio.CancelledError as exc:
            if not late:
                raise
            if not self.reader.connected:
                why = f"the KV session to {self.instance_id} is not open in time"
                raise NotInTime(why) from exc
            raise LeaseRefused(f"{self.instance_id}: other reads took long", reason="busy") from exc
        finally:
            timer.cancel()

    async def end(self, lease: Lease) -> bool:
        """Give a lease back. Returns whether it was valid until now. Raises PeerUnavailable."""
        match await self._ask(lambda rid: LeaseEnd(rid=rid, lease=lease.lease), END_S):
            case LeaseEnded() as reply:
                return reply.valid
        return False

    def forget(self, lease: Lease) -> None:
        """Give back a lease that is not wanted, without waiting for the answer."""
        self._channel.write(LeaseEnd(rid=0, lease=lease.lease), now=True)

    def hears(self, message: Any) -> None:
        """Take a message of the holder."""
        if isinstance(message, Lease | NoLease | LeaseEnded):
            self._replies.answer(message.rid, message)

    def _unwanted(self, message: Any) -> None:
        if isinstance(message, Lease):
            self.forget(message)  # it came too late

    def drop(self) -> None:
        """End the connection. Idempotent. A read under way goes on."""
        if self.lost:
            return
        self.lost = True
        self._channel.close()
        self._replies.fail(PeerUnavailable(f"lost {self.instance_id}"))

    async def _ask(self, make: Callable[[int], Any], within_s: float) -> Any:
        if self.lost:
            raise PeerUnavailable(f"lost {self.instance_id}")
        rid = next(self._rids)
        late = NotInTime(f"{self.instance_id} does not answer in time")
        return await self._replies.ask(
            rid, lambda: self._channel.write(make(rid), now=True), within_s, late
        )


class _Place:
    """What `Holders` remembers about one holder, also while there is no connection to it.

    holder: the connection. None: there has been none yet.
    connecting: held while the connection is made, so that it is made once.
    not_before: when the holder may be asked again, by the loop's clock.
    backoff: how long it is not asked after its next failure.
    idle: closes the connection after IDLE_S without use."""

    def __init__(self, rest: Callable[[_Place], bool]) -> None:
        self.holder: Holder | None = None
        self.connecting = asyncio.Lock()
        self.not_before = 0.0
        self.backoff = Backoff(AGAIN_S, AGAIN_MOST_S)
        self.idle = IdleTimer(lambda: rest(self), IDLE_S)


class Holders:
    """Makes, keeps and closes the connections to all holders.

    hello: makes the first message of a connection.
    reach: opens another worker's KV memory for reading.
    key: the cluster key. A holder must hold the same one."""

    def __init__(
        self, hello: Callable[[], LeaseHello], reach: Reach, key: ClusterKey | None
    ) -> None:
        self._hello = hello
        self._reach = reach
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._places: dict[str, _Place] = {}
        self._readers: set[KvReader] = set()
        self._listening: set[asyncio.Task[None]] = set()
        self._closed = False

    def away(self, instance_id: str) -> bool:
        """Whether this holder failed lately. Any thread."""
        place = self._places.get(instance_id)
        return place is not None and self._loop.time() < place.not_before

    async def use(self, at: PrefixHolder) -> Holder:
        """Return a connection to a holder. Raises PeerUnavailable."""
        if self._closed:
            raise PeerUnavailable("this worker is leaving")
        if (place := self._places.get(at.instance_id)) is None:
            if len(self._places) >= MOST:
                self._tidy()
            place = self._places[at.instance_id] = _Place(self._rest)
        with place.idle.used():
            async with place.connecting:
                if place.holder is None or place.holder.lost:
                    if self.away(at.instance_id):
                        raise PeerUnavailable(f"{at.instance_id} could not be asked just now")
                    try:
                        place.holder = await self._connect(at)
                    except (PullfillError, OSError, EOFError, TimeoutError) as exc:
                        self.failed(at.instance_id)
                        why = f"cannot ask {at.instance_id} for its prefix cache: {exc}"
                        logger.info(why)
                        raise PeerUnavailable(why) from exc
            if self._closed:
                place.holder.drop()
                raise PeerUnavailable("this worker is leaving")
            return place.holder

    def worked(self, instance_id: str) -> None:
        """Note that a read from this holder has succeeded."""
        if (place := self._places.get(instance_id)) is not None:
            place.backoff.reset()
            place.not_before = 0.0

    def slow(self, instance_id: str) -> None:
        """Note that this holder has not answered in time, as in a long step of its engine.

        It is not asked for AGAIN_S."""
        if (place := self._places.get(instance_id)) is not None:
            place.not_before = self._loop.time() + AGAIN_S

    def failed(self, instance_id: str) -> None:
        """Close the connection to this holder, and do not ask it for a while."""
        if (place := self._places.get(instance_id)) is None:
            return
        if (now := self._loop.time()) >= place.not_before:  # else others have failed with it
            place.not_before = now + place.backoff.next()
        if place.holder is not None:
            place.holder.drop()

    async def close(self) -> None:
        """End all connections, and wait for the reads under way. Nothing is read afterwards."""
        self._closed = True
        for place in self._places.values():
            place.idle.stop()
            if place.holder is not None:
                place.holder.drop()
        for reader in list(self._readers):
            await asyncio.to_thread(reader.close)
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)

    # ------------------------------------------------------------------ inside

    async def _connect(self, at: PrefixHolder) -> Holder:
        host, port = frames.split_address(at.control)
        async with asyncio.timeout(CONNECT_S):
            _, channel = await self._loop.create_connection(Channel, host, port)
            try:
                await introduce(channel, self._key, self._hello())
                first: Any = await channel.read(ToAsker)  # type: ignore[arg-type]
                if isinstance(first, Goodbye):
                    raise PeerUnavailable(f"refused: {first.reason}")
                if not isinstance(first, LeaseWelcome):
                    raise BadMessage("no welcome")
                if first.decode_instance != at.instance_id:
                    raise PeerUnavailable(f"its address is now used by {first.decode_instance}")
                open_session = self._reach(first.regions)
            except BaseException:
                channel.close()
                raise
        reader = KvReader(at.instance_id, open_session, otherwise="cannot be read")
        self._readers.add(reader)
        holder = Holder(at.instance_id, channel, reader)
        task = self._loop.create_task(self._listen(holder, channel))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)
        return holder

    async def _listen(self, holder: Holder, channel: Channel) -> None:
        try:
            channel.hear(ToAsker, holder.hears)
            await channel.ended()
        except (EOFError, OSError, PullfillError) as exc:
            logger.debug("connection to %s: %s", holder.instance_id, exc)
        finally:
            holder.drop()
            holder.reader.leave(lambda: self._readers.discard(holder.reader))

    def _tidy(self) -> None:
        """Forget the holders that we are not connected to."""
        for name, place in list(self._places.items()):
            if not place.connecting.locked() and (place.holder is None or place.holder.lost):
                del self._places[name]

    def _rest(self, place: _Place) -> bool:
        """Close an unused connection."""
        if place.holder is not None:
            place.holder.drop()
        return True
