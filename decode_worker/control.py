"""The control server: prefill workers connect here. They claim jobs, and commit or give them up.

Other decode workers connect, too, to read prefixes (read_leases.py).

A prefill worker has one TCP connection, and the connection is its identity. So nobody can commit in
another's name, and when a worker dies the kernel ends its connection. What is said about a job goes
to handoff.py. Everything runs on the worker's asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pullfill.decode_worker.handoff import Handoff
from pullfill.decode_worker.kv_reader import KvReader, Reach
from pullfill.decode_worker.peers import Peer, Peers
from pullfill.decode_worker.prefix.read_leases import ReadLeases
from pullfill.decode_worker.self_check import Checks
from pullfill.errors import AuthFailed, BadMessage, NotNow, OtherVersion, PullfillError
from pullfill.net.channel import Channel, accept, listen
from pullfill.net.security import ClusterKey
from pullfill.runtime import log, metrics
from pullfill.runtime.lifecycle import Tasks, end, stop_listening
from pullfill.wire import (
    SILENT_S,
    Claim,
    Commit,
    Compat,
    DrainAck,
    Draining,
    GiveUp,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseHello,
    Progress,
    Ready,
    ToDecode,
    Welcome,
)

logger = log.get("decode_worker.control")


@dataclass(eq=False, repr=False)
class ControlServer:
    """Serves the connections of prefill workers."""

    handoff: Handoff
    welcome: Callable[[], Welcome]
    compat: Compat
    silent_s: float = SILENT_S
    # The cluster key. A prefill worker that does not hold it is refused.
    key: ClusterKey | None = None
    # Opens a prefill worker's memory for reading, in pull mode. A prefill worker whose memory
    # cannot be read writes instead.
    reach: Reach | None = None
    # The self-check, which is told who connects. None: nothing can be compared.
    checks: Checks | None = None
    leases: ReadLeases | None = None  # lets other decode workers read the prefix cache
    address: str = field(init=False, default="")
    _readers: set[KvReader] = field(init=False, default_factory=set)
    _serial: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _server: asyncio.Server | None = field(init=False, default=None)
    _tasks: Tasks = field(init=False, default_factory=Tasks)
    _seldom: log.Seldom = field(init=False, default_factory=lambda: log.Seldom(60.0))

    @property
    def peers(self) -> Peers:
        """Those that are connected."""
        return self.handoff.peers

    async def start(self, host: str, port: int = 0) -> None:
        """Listen, and start the ledger's timer.

        port: 0 lets the OS choose one. Raises NotNow if it is taken."""
        try:
            self._server = await listen(self._opened, host, port)
        except OSError as exc:
            raise NotNow(f"cannot listen for prefill workers on {host}:{port}: {exc}") from exc
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"tcp://{host}:{port}"
        self._tasks.begin(self.handoff.run(), "timer of the ledger")
        self._tasks.begin(self._watch_silence(), "silence of prefill workers")

    async def stop(self) -> None:
        """Close every connection. When this returns, nothing here touches the ledger any more."""
        if self._server is not None:
            await stop_listening(self._server)
        await end(*self._tasks)
        await self.handoff.close()
        for reader in list(self._readers):
            await asyncio.to_thread(reader.close)

    async def _watch_silence(self) -> None:
        """End the connection of a prefill worker that says nothing: it is stopped or cut off.

        The kernel does not end it. The ledger gives its jobs to others or serves them here, and
        keeps the blocks that it may be writing."""
        pause = self.silent_s / 5
        while True:
            before = self._loop.time()
            await asyncio.sleep(pause)
            if self._loop.time() - before > 2 * pause:
                # This process did not run. What the workers said meanwhile is not read yet.
                for peer in self.peers.values():
                    peer.heard = self._loop.time()
            for peer in list(self.peers.values()):
                if self._loop.time() - peer.heard > self.silent_s:
                    logger.warning(
                        "prefill worker %s is silent for %.0f s: going on without it",
                        peer.instance_id,
                        self.silent_s,
                    )
                    peer.channel.abort()

    def _opened(self, channel: Channel) -> None:
        self._tasks.begin(self._serve(channel), "control connection")

    async def _serve(self, channel: Channel) -> None:
        peer: Peer | None = None
        try:
            peer = await self._greet(channel)
            if peer is not None:
                await channel.hear(ToDecode, partial(self._hears, peer))
        except EOFError:
            pass
        except AuthFailed as exc:
            metrics.AUTH_REFUSED.labels("control").inc()
            self._complain("refused", channel.peer, exc)
        except (BadMessage, TimeoutError) as exc:
            metrics.STALE_REFUSED.labels("message").inc()
            self._complain("closed", channel.peer, exc)
        except asyncio.CancelledError:
            pass
        except Exception:
            logger.exception("a message of %s failed; ending its connection", channel.peer)
        finally:
            channel.close()
            if peer is not None:
                self._lost(peer)

    def _complain(self, what: str, peer: str, why: Exception) -> None:
        """Log it, but seldom: a worker that is refused tries again every 2 s."""
        host = peer.rpartition(":")[0]
        if (more := self._seldom.due(f"{what} {host} {type(why).__name__}")) is not None:
            logger.warning("%s a control connection from %s: %s%s", what, peer, why, more)

    async def _greet(self, channel: Channel) -> Peer | None:
        try:
            async with asyncio.timeout(5.0):
                hello = await accept(channel, self.key)
        except (AuthFailed, OtherVersion) as exc:
            channel.write(Goodbye(reason=str(exc)))
            raise
        if isinstance(hello, LeaseHello):
            if self.leases is not None:
                await self.leases.serve(channel, hello)
            return None
        if hello.compat != self.compat.hash():
            channel.write(Goodbye(reason=f"compatibility hash differs: {hello.compat} is not ours"))
            return None
        name = f"{hello.prefill_instance}#{next(self._serial)}"
        peer = Peer(
            name, hello, channel, self._loop.time(), self._reader_of(hello),
            why_not=hello.why,
        )  # fmt: skip
        self.peers[peer.name] = peer
        for old in [p for p in self.peers.values() if p.instance_id == peer.instance_id]:
            if old is not peer:
                old.channel.abort()  # a worker has one connection, so this one is dead
        self.handoff.pulling_changed()
        channel.write(self.welcome())
        logger.info("prefill worker %s connected", peer.instance_id)
        short = f"short {peer.instance_id}"  # it may connect again every minute
        if hello.max_prompt_tokens and self._seldom.due(short) is not None:
            logger.warning(
                "prefill worker %s takes prompts of %d tokens at most (its --max-model-len): "
                "longer ones go to other prefill workers, or stay here if there are none",
                peer.instance_id, hello.max_prompt_tokens,
            )  # fmt: skip
        if self.checks is not None:
            self.checks.met(peer)
        return peer

    def _reader_of(self, hello: Hello) -> KvReader | None:
        if self.reach is None:
            return None
        try:
            return KvReader(hello.prefill_instance, self.reach(hello.regions), self._readers)
        except PullfillError as exc:
            name = hello.prefill_instance
            logger.warning("%s writes, because we cannot read from it: %s", name, exc)
            return None

    def _lost(self, peer: Peer) -> None:
        self.peers.pop(peer.name, None)
        if self.checks is not None:
            self.checks.lost(peer)
        logger.info("prefill worker %s disconnected", peer.instance_id)
        self.handoff.lost(peer)
        if peer.reader is not None:
            peer.reader.leave()

    def _hears(self, peer: Peer, message: object) -> None:
        """Take one message of a prefill worker that was welcomed."""
        handoff = self.handoff
        peer.heard = self._loop.time()
        if isinstance(message, Claim | Commit | Ready | Heartbeat):
            peer.load, peer.told = message.load, peer.heard
        match message:
            case Heartbeat():
                self._beat(peer, message)
            case Claim():
                handoff.grant(peer, message)
            case Progress():
                handoff.progress(peer, message)
            case Commit():
                handoff.commit(peer, message)
            case Ready():
                handoff.ready(peer, message)
            # The messages above make no deadline earlier, so the ledger's timer need not run.
            case GiveUp():
                handoff.ledger.gave_up(message, peer.name)
                handoff.wake.set()
            case DrainAck():
                pass  # the ledger asks for the proof by itself
            case Draining():
                peer.leaving = True
                handoff.pulling_changed()
            case _:
                raise BadMessage("hello was already said")
        handoff.act()

    def _beat(self, peer: Peer, beat: Heartbeat) -> None:
        peer.channel.write(beat)
        if beat.why != peer.why_not:
            peer.why_not = beat.why
            state = f"pulls no jobs: {beat.why}" if beat.why else "pulls again"
            logger.warning("prefill worker %s %s", peer.instance_id, state)
            self.handoff.pulling_changed()
