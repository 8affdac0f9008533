"""The control server: prefill workers connect here. They claim jobs, and commit or give them up.

Other decode workers connect, too, to read prefixes (read_leases.py).

A prefill worker has one TCP connection, and the connection is its identity. So nobody can commit in
another's name, and when a worker dies the kernel ends its connection. What is said about a job goes
to grants.py. Everything runs on the worker's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pullfill.decode_worker.forecast import PrefillWorkers
from pullfill.decode_worker.grants import Grants
from pullfill.decode_worker.kv_reader import KvReader, Reach
from pullfill.decode_worker.ledger import CancelMessage, Ledger, NakDelivery, SendRevoke
from pullfill.decode_worker.peers import Peer, Peers
from pullfill.decode_worker.prefix.read_leases import ReadLeases
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.self_check import Checks
from pullfill.errors import (
    AuthFailed,
    BadMessage,
    OtherVersion,
    Outcome,
    PeerUnavailable,
    PullfillError,
)
from pullfill.net.channel import Channel, accept
from pullfill.net.security import ClusterKey
from pullfill.runtime import log, metrics
from pullfill.runtime.lifecycle import stop_listening
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
    KvMode,
    LeaseHello,
    Progress,
    Ready,
    Revoke,
    ToDecode,
    Trial,
    Welcome,
)

logger = log.get("decode_worker.control")

_COMPLAIN_EVERY_S = 60.0


class ControlServer:
    """Serves the connections of prefill workers, and does what the ledger asks of the network.

    cancel, nak: methods of the queue's producer.
    key: the cluster key. A prefill worker that does not hold it is refused.
    reach: opens a prefill worker's memory for reading. In pull mode a prefill worker whose memory
    cannot be read writes instead.
    checks: the self-check, which is told who connects. None: nothing can be compared.
    leases: lets other decode workers read the prefix cache. Set before `start`.
    prefill_workers: number of prefill workers that pull jobs of this worker.
    forecaster: is told how long the writing of KV took.
    """

    def __init__(
        self,
        *,
        instance_id: str,
        compat: Compat,
        ledger: Ledger,
        traces: RequestTraces,
        cancel: Callable[[object], Awaitable[object]],
        nak: Callable[[str, Any], Awaitable[None]],
        silent_s: float = SILENT_S,
        key: ClusterKey | None = None,
        reach: Reach | None = None,
        forecaster: PrefillWorkers | None = None,
        checks: Checks | None = None,
    ) -> None:
        self._instance_id = instance_id
        self._compat = compat
        self._ledger = ledger
        self._traces = traces
        self.forecaster = forecaster or PrefillWorkers()
        self.grants = Grants(ledger, traces, self.forecaster, self._spawn, self._act)
        self._cancel = cancel
        self._nak = nak
        self._silent_s = silent_s
        self._key = key
        self._reach = reach
        self._readers: set[KvReader] = set()
        self.peers = Peers()
        self._serial = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._seldom = log.Seldom(_COMPLAIN_EVERY_S)
        self.address = ""
        self.prefill_workers = 0
        self.checks = checks
        self.leases: ReadLeases | None = None

    async def start(self, host: str, port: int = 0) -> None:
        """Listen, and start the ledger's timer.

        port: 0 lets the OS choose one."""
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(lambda: Channel(self._opened), host, port)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"tcp://{host}:{port}"
        self._timers += map(asyncio.create_task, (self._run_ledger(), self._watch_silence()))

    async def stop(self) -> None:
        """Close every connection. When this returns, nothing here touches the ledger any more.

        Jobs that end with the connections are deleted from the queue, if it answers within 1 s."""
        if self._server is not None:
            await stop_listening(self._server)
        if self.checks is not None:
            await self.checks.close()
        for task in [*self._serving, *self._timers]:
            task.cancel()
        await asyncio.gather(*self._serving, *self._timers, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for left in list(self._tasks):
            left.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reader in list(self._readers):
            await asyncio.to_thread(reader.close)

    def dismiss(self) -> None:
        """End the connections to all prefill workers. They come again while we are registered."""
        for peer in list(self.peers.values()):
            peer.channel.close()

    def wake(self) -> None:
        """Look at the ledger's actions and deadlines. asyncio thread."""
        self._wake.set()

    # ------------------------------------------------------------------ the ledger's side

    async def _run_ledger(self) -> None:
        while True:
            try:
                soonest = self._ledger.tick()
                # Since the last worker left, jobs may have been queued: given up by it, proved
                # quiet in this tick, or opened by an engine thread that still saw the worker.
                self._nobody_pulls()
                self._act()
            except Exception:
                # Deadlines and proofs depend on this loop, so it goes on after any error.
                logger.exception("the ledger's timer failed; going on")
                soonest = 0.05
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(soonest):
                    await self._wake.wait()
            self._wake.clear()

    def _act(self) -> None:
        for action in self._ledger.take_actions():
            match action:
                case SendRevoke(name, job_id, attempt, reason):
                    # Only this action makes something due earlier: a proof, or the claim of a job
                    # that is queued again. So the timer must look again.
                    self._wake.set()
                    if (peer := self.peers.get(name)) is not None:
                        peer.channel.write(Revoke(job_id=job_id, attempt=attempt, reason=reason))
                case CancelMessage(receipt):
                    self._spawn(self._cancel(receipt))
                case NakDelivery(ack_subject, receipt):
                    self._spawn(self._nak(ack_subject, receipt))

    def _spawn(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            logger.warning("could not settle a message: %s", exc)

    async def _watch_silence(self) -> None:
        """End the connection of a prefill worker that says nothing: it is stopped or cut off.

        The kernel does not end it. The ledger gives its jobs to others or serves them here, and
        keeps the blocks that it may be writing."""
        pause = self._silent_s / 5
        while True:
            before = self._loop.time()
            await asyncio.sleep(pause)
            if self._loop.time() - before > 2 * pause:
                # This process did not run. What the workers said meanwhile is not read yet.
                for peer in self.peers.values():
                    peer.heard = self._loop.time()
            for peer in list(self.peers.values()):
                now = self._loop.time()
                if now - peer.heard > (patience := peer.patience(now, self._silent_s)):
                    logger.warning(
                        "prefill worker %s is silent for %.0f s: going on without it",
                        peer.instance_id,
                        patience,
                    )
                    peer.channel.abort()

    # ------------------------------------------------------------------ the network's side

    def _opened(self, channel: Channel) -> None:
        task = asyncio.create_task(self._serve(channel))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, channel: Channel) -> None:
        peer: Peer | None = None
        try:
            peer = await self._greet(channel)
            if peer is not None:
                channel.hear(ToDecode, partial(self._hears, peer))
                await channel.ended()
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
                hello = await accept(channel, self._key)
        except (AuthFailed, OtherVersion) as exc:
            channel.write(Goodbye(reason=str(exc)))
            raise
        if isinstance(hello, LeaseHello):
            if self.leases is not None:
                await self.leases.serve(channel, hello)
            return None
        if hello.compat != self._compat.hash():
            channel.write(Goodbye(reason=f"compatibility hash differs: {hello.compat} is not ours"))
            return None
        name = f"{hello.prefill_instance}#{next(self._serial)}"
        now, reader = self._loop.time(), self._reader_of(hello)
        peer = Peer(
            name,
            hello.prefill_instance,
            channel,
            now,
            reader,
            hello.computes,
            hello.adapters,
            hello.features,
            max_prompt_tokens=hello.max_prompt_tokens,
            pulls=not hello.why,
            why_not=hello.why,
        )
        self.peers[peer.name] = peer
        for old in [p for p in self.peers.values() if p.instance_id == peer.instance_id]:
            if old is not peer:
                old.channel.abort()  # a worker has one connection, so this one is dead
        self._count()
        self._ledger.prefill_free()
        channel.write(Welcome(decode_instance=self._instance_id))
        logger.info("prefill worker %s connected", peer.instance_id)
        short = f"short {peer.instance_id}"  # it may connect again every minute
        if peer.max_prompt_tokens and self._seldom.due(short) is not None:
            logger.warning(
                "prefill worker %s takes prompts of %d tokens at most (its --max-model-len): "
                "longer ones go to other prefill workers, or stay here if there are none",
                peer.instance_id, peer.max_prompt_tokens,
            )  # fmt: skip
        if self.checks is not None:
            self.checks.met(peer)
        return peer

    def _reader_of(self, hello: Hello) -> KvReader | None:
        if self._reach is None or self._ledger.kv_mode is not KvMode.PULL:
            return None
        try:
            reader = KvReader(hello.prefill_instance, self._reach(hello.regions))
        except PullfillError as exc:
            name = hello.prefill_instance
            logger.warning("%s writes, because we cannot read from it: %s", name, exc)
            return None
        self._readers.add(reader)
        return reader

    def _lost(self, peer: Peer) -> None:
        self.peers.pop(peer.name, None)
        if self.checks is not None:
            self.checks.lost(peer)
        self._count()
        logger.info("prefill worker %s disconnected", peer.instance_id)
        self._ledger.writer_lost(peer.name, others_alive=bool(self.peers))
        self._nobody_pulls()
        self._act()
        self._wake.set()  # if the worker died, the kernel has freed its locks: ask for the proof
        if (reader := peer.reader) is not None:
            reader.leave(lambda: self._readers.discard(reader))

    def send(self, name: str, body: bytes) -> None:
        """Send a job to one prefill worker, past the queue. name: of its connection.

        Raises PeerUnavailable."""
        if (peer := self.peers.get(name)) is None:
            raise PeerUnavailable(f"{name} is not connected any more")
        peer.channel.write(Trial(job=body))

    def _count(self) -> None:
        self.prefill_workers = len(self.peers.pulling)
        # Before `_nobody_pulls` looks: what is opened after that look is told.
        self._ledger.tell_opens = not self.prefill_workers

    def _nobody_pulls(self) -> None:
        """Serve locally what nobody has claimed, if no prefill worker pulls jobs."""
        if not self.prefill_workers and self._ledger.open_jobs:
            self._ledger.give_up_all(Outcome.PREFILL_LOST, but_granted=True)

    def _hears(self, peer: Peer, message: object) -> None:
        peer.heard = self._loop.time()
        self._dispatch(peer, message)
        self._act()

    def _dispatch(self, peer: Peer, message: object) -> None:
        if isinstance(message, Claim | Commit | Ready):
            peer.asked_at = peer.heard
        if isinstance(message, Claim | Heartbeat):
            peer.load = message.load
        match message:
            case Heartbeat():
                peer.channel.write(message)
                if peer.busy and not message.busy:
                    self._ledger.prefill_free()
                peer.busy = message.busy
                if (message.pulls, message.why) != (peer.pulls, peer.why_not):
                    peer.pulls, peer.why_not = message.pulls, message.why
                    state = "pulls again" if peer.pulls else f"pulls no jobs: {peer.why_not}"
                    logger.warning("prefill worker %s %s", peer.instance_id, state)
                    self._count()
                    if peer.pulls:
                        self._ledger.prefill_free()
                    self._nobody_pulls()
                    self._wake.set()
                return
            # These four messages make no deadline earlier, so the ledger's timer need not run.
            case Claim():
                self.grants.grant(peer, message)
                return
            case Progress():
                self.grants.progress(peer, message)
                return
            case Commit():
                self.grants.commit(peer, message)
                return
            case Ready():
                self.grants.ready(peer, message)
                return
            case GiveUp():
                self.grants.gave_up(peer, message)
            case DrainAck():
                self._ledger.tick()  # ask for the proof now instead of at the next tick
            case Draining():
                peer.leaving = True
                self._count()
                self._nobody_pulls()
            case _:
                raise BadMessage("hello was already said")
        self._wake.set()
