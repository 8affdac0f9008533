"""This worker's connection to one decode worker: control channel, descriptor, transfer worker.

`ControlConnections` makes a connection when it is needed and closes it when it is idle. If it
breaks, it is made again while the decode worker is in the directory.

When a connection breaks, every task granted over it ends, and the decode worker revokes their
grants. A silent connection is ended too: jobs of other decode workers must not wait for this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from pullfill.backoff import Backoff
from pullfill.errors import AuthFailed, BadMessage, ClaimRefused, PeerUnavailable, PullfillError
from pullfill.net import frames, heartbeat
from pullfill.net.channel import Channel, introduce
from pullfill.net.replies import Replies
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.shared_transfer_worker import SharedTransferWorker
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.runtime import log, metrics
from pullfill.runtime.idle import IDLE_S
from pullfill.runtime.lifecycle import end
from pullfill.wire import (
    MAX_TEXT,
    SILENT_S,
    Claim,
    Commit,
    CommitReply,
    DrainAck,
    Draining,
    GiveUp,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Load,
    Progress,
    Ready,
    Refused,
    Revoke,
    ToPrefill,
    Trial,
    Welcome,
    WorkerRecord,
)  # fmt: skip

logger = log.get("prefill_worker.control_connection")

REPLY_S = 10.0


class ConnectionLost(PeerUnavailable):
    """The connection ended while a claim, a grant or a commit was under way. If the job was
    granted, the decode worker naks its delivery."""


class ControlConnection:
    """One decode worker, by instance id. asyncio thread only.

    open_transfer_worker: connects to the decode worker's KV memory, on a thread.
    on_revoke: called with each Revoke.
    on_lost: called when the connection ends.
    on_trial: called with each job of a self-check.
    key: the cluster key. The decode worker must hold the same one.
    on_idle: called when no job has needed the connection for `idle_s`, unless it is `standing`. The
    owner then closes it.
    activity: returns how many jobs this worker has completed, and how many it has a grant for.
    load: returns the load that this worker reports.
    transfer: the transfer worker into the decode worker's memory, shared by all jobs.
    """

    def __init__(
        self,
        record: WorkerRecord,
        hello: Hello,
        open_transfer_worker: Callable[[WorkerRecord], Awaitable[TransferWorker]],
        on_revoke: Callable[[ControlConnection, Revoke], None],
        on_lost: Callable[[ControlConnection], None],
        key: ClusterKey | None = None,
        silent_s: float = SILENT_S,
        on_trial: Callable[[Trial], None] = lambda _trial: None,
        on_idle: Callable[[ControlConnection], None] = lambda _connection: None,
        idle_s: float = IDLE_S,
    ) -> None:
        self.record = record
        self._hello = replace(hello, max_prompt_tokens=0)
        if (most := hello.max_prompt_tokens or math.inf) < record.max_model_len - 1:
            self._hello = hello
            logger.info(
                "decode worker %s takes prompts of up to %d tokens, and this worker up to %d (its "
                "--max-model-len): longer ones are left to other prefill workers",
                record.instance_id, record.max_model_len - 1, most,
            )  # fmt: skip
        self._on_revoke = on_revoke
        self._on_lost = on_lost
        self._on_trial = on_trial
        self._key = key
        self._silent_s = silent_s
        self._on_idle = on_idle
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._heard = self._asked_at = self._needed_at = self._loop.time()
        self._said = ""
        self._rids = itertools.count(1)
        self._replies = Replies(self._return_late)
        self._channel: Channel | None = None
        name = record.instance_id
        self.transfer = SharedTransferWorker(lambda: open_transfer_worker(record), name)
        self._up = asyncio.Event()
        # Set while the connection is up, and after a failed attempt to connect.
        self._known = asyncio.Event()
        self._welcomed = False
        self._silent = False
        self._leaving = False
        self._why_not = ""
        self.activity: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.load: Callable[[], Load] = Load
        self._completed = 0
        self.standing = True
        self.retired = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Leave: no reconnect, transfer worker ended."""
        await end(self._task)

    def when_over(self, call: Callable[[ControlConnection], None]) -> None:
        """Have `call` called when this connection has ended."""
        self._task.add_done_callback(lambda _: call(self))

    def retire(self) -> None:
        """Connect no more: the decode worker has left the directory, because it drains or is dead.

        Granted jobs go on."""
        self.retired = True
        if not self.connected:
            self._task.cancel()

    def _idle(self) -> bool:
        """Whether nothing has needed this connection for `idle_s`."""
        now = self._loop.time()
        if self.standing or self._replies or self.transfer.in_use:
            self._needed_at = now
            return False
        return now - max(self._needed_at, self._asked_at) >= self._idle_s

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until the decode worker has welcomed us.

        Raises PeerUnavailable after `timeout_s`. Raises it at once if the decode worker refuses us,
        is silent, or has left the directory."""
        if not self._known.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._known.wait()
        if not self._up.is_set():
            raise PeerUnavailable(
                f"decode worker {self.record.instance_id} at {self.record.control} does not answer"
            )

    # ------------------------------------------------------------------ requests

    async def claim(self, job_id: str, incarnation: str, ack: str) -> Grant:
        """Raises ClaimRefused with the decode worker's reason, PeerUnavailable."""
        rid = next(self._rids)
        load = self.load()
        message = Claim(rid=rid, job_id=job_id, incarnation=incarnation, ack_subject=ack, load=load)
        reply = await self._ask(rid, message)
        if isinstance(reply, Refused):
            raise ClaimRefused(
                f"job {job_id}: {reply.reason.value}",
                reason=reply.reason.value,
                retry_after_s=reply.retry_after_s,
            )
        assert isinstance(reply, Grant)
        return reply

    async def commit(
        self, make: Callable[[int], Commit | Ready], within_s: float = REPLY_S
    ) -> CommitReply:
        """Send a commit, or in pull mode a `Ready`, and return the answer.

        make: makes the message with a given request id.
        within_s: raise PeerUnavailable after this time."""
        rid = next(self._rids)
        reply = await self._ask(rid, make(rid), within_s)
        assert isinstance(reply, CommitReply)
        return reply

    def leave(self) -> None:
        """Tell the decode worker, now and after each reconnect, that we pull no more jobs."""
        self._leaving = True
        self.send(Draining())

    def pause(self, why: str) -> None:
        """Tell the decode worker why this worker pulls no jobs, now and with every Heartbeat.

        why: empty if it pulls."""
        self._why_not = why[:MAX_TEXT]
        self.send(self._alive())

    def _alive(self) -> Heartbeat:
        before, (self._completed, granted) = self._completed, self.activity()
        busy = granted > 0 or self._completed != before
        return Heartbeat(pulls=not self._why_not, why=self._why_not, busy=busy, load=self.load())

    def give_up(self, grant: Grant, cause: str, *, retry: bool) -> None:
        """Tell the decode worker that the attempt is over here.

        retry: whether another attempt may succeed."""
        self.send(
            GiveUp(
                job_id=grant.job_id, attempt=grant.attempt, incarnation=grant.incarnation,
                cause=cause[:500], retry=retry,
            )
        )  # fmt: skip

    def send(self, message: GiveUp | DrainAck | Draining | Heartbeat | Progress) -> None:
        """No answer expected; lost when the connection is."""
        if self._channel is not None:
            self._channel.write(message)

    async def _ask(
        self, rid: int, message: Claim | Commit | Ready, within_s: float = REPLY_S
    ) -> Any:
        channel = self._channel
        if channel is None:
            raise PeerUnavailable(f"decode worker {self.record.instance_id} is not connected")
        self._asked_at = self._loop.time()
        late = PeerUnavailable(f"decode worker {self.record.instance_id} does not answer in time")
        return await self._replies.ask(
            rid, lambda: channel.write(message, now=True), within_s, late
        )

    # ------------------------------------------------------------------ connection

    async def _run(self) -> None:
        backoff = Backoff(0.05)
        try:
            while True:
                try:
                    await self._session()
                except (OSError, EOFError, BadMessage, TimeoutError) as exc:
                    logger.debug("control connection to %s: %s", self.record.instance_id, exc)
                except PullfillError as exc:
                    if isinstance(exc, AuthFailed):
                        metrics.AUTH_REFUSED.labels("control").inc()
                    level = logger.debug if str(exc) == self._said else logger.warning
                    level("control connection to %s: %s", self.record.instance_id, exc)
                    self._said = str(exc)
                except Exception:
                    logger.exception("control connection to %s failed", self.record.instance_id)
                if self.retired:
                    return
                if self._idle():
                    self._on_idle(self)
                    return
                if self._welcomed:
                    backoff.reset()
                    self._welcomed = False
                else:
                    self._known.set()
                await asyncio.sleep(backoff.next())
        finally:
            self._known.set()
            self.transfer.close()

    async def _session(self) -> None:
        host, port = frames.split_address(self.record.control)
        async with asyncio.timeout(5.0):
            _, channel = await self._loop.create_connection(Channel, host, port)
        try:
            first = await self._greet(channel)
            self._channel, self._said, self._silent = channel, "", False
            self._welcomed = True
            self._asked_at = self._loop.time()
            self.transfer.forgive()
            if self._leaving:
                self.send(Draining())
            self._up.set()
            self._known.set()
            tell = logger.info if self.standing else logger.debug
            tell("connected to decode worker %s", first.decode_instance)
            beat = asyncio.create_task(self._say_alive(channel))
            try:
                channel.hear(ToPrefill, lambda message: self._dispatch(message))
                await channel.ended()
            finally:
                beat.cancel()
        finally:
            was_up = self._up.is_set()
            self._up.clear()
            if not self._silent:
                self._known.clear()
            self._channel = None
            channel.close()
            self._replies.fail(ConnectionLost(f"lost decode worker {self.record.instance_id}"))
            if was_up:
                self._on_lost(self)

    async def _greet(self, channel: Channel) -> Welcome:
        async with asyncio.timeout(10.0):
            try:
                await introduce(channel, self._key, self._hello)
                first: Any = await channel.read(ToPrefill)  # type: ignore[arg-type]
            except EOFError:
                raise PeerUnavailable(
                    "it ended the connection without a welcome; its log says why"
                ) from None
        if isinstance(first, Goodbye):
            raise PeerUnavailable(f"refused: {first.reason}")
        if not isinstance(first, Welcome):
            raise BadMessage("no welcome")
        if first.decode_instance != self.record.instance_id:
            raise PeerUnavailable(f"its address is now used by {first.decode_instance}")
        return first

    async def _say_alive(self, channel: Channel) -> None:
        said = now = self._heard = self._loop.time()
        channel.write(self._alive())
        while True:
            before, unasked = now, now - self._asked_at
            pause = heartbeat.pause(unasked)
            patience = heartbeat.patience(unasked, self._silent_s)
            await asyncio.sleep(heartbeat.due(said, self._asked_at, pause) - now)
            now = self._loop.time()
            if self._idle():
                self._on_idle(self)
                return
            if now - before > pause + heartbeat.ALIVE_INTERVAL_S:
                self._heard = now  # we did not run either: what it said waits to be read
            elif now - self._heard > patience:
                self._drop(f"it said nothing for {patience:.0f} s")
                return
            if now >= heartbeat.due(said, self._asked_at, pause):
                channel.write(self._alive())
                said = now

    def _drop(self, why: str) -> None:
        """End the connection and the transfer worker, with its credits; both are made anew."""
        logger.warning("ending the control connection to %s: %s", self.record.instance_id, why)
        self.transfer.drop()
        self._silent = True
        if self._channel is not None:
            self._channel.abort()

    def _dispatch(self, message: Any) -> None:
        self._heard = self._loop.time()
        if isinstance(message, Grant | CommitReply | Refused):
            self._replies.answer(message.rid, message)
        elif isinstance(message, Revoke):
            self._on_revoke(self, message)
        elif isinstance(message, Trial):
            self._on_trial(message)

    def _return_late(self, message: Any) -> None:
        """Nobody waits for this answer any more. If it is a grant, give it up."""
        if isinstance(message, Grant):
            self.give_up(message, "answer came too late", retry=True)
