"""The job queue on NATS JetStream. The decode side publishes jobs with a `JetStreamProducer`. The
puller of the prefill side takes them with a `JetStreamConsumer`.

nats_connection.py  one connection, redialled after each loss
streams.py          names of streams and subjects; makes and checks the streams and the consumers
depth.py            depth from a cache
dead_letters.py     jobs that nobody may try again
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pullfill.backoff import Backoff
from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, ConfigError, QueueFull, QueueUnavailable
from pullfill.queue.contract import Delivery, Receipt, Turns, Urgency
from pullfill.queue.dead_letters import DeadLetters, delete_message
from pullfill.queue.depth import MAX_HOLES, DepthCache, ask_depth
from pullfill.queue.nats_connection import (
    ApiError,
    NatsConnection,
    NotSent,
    read_reply,
)
from pullfill.queue.streams import (
    EXPECTED_STREAM,
    MSG_ID,
    STREAM_NOT_FOUND,
    Names,
    QueueEnd,
    consumer_of,
    parse_ack,
    subject_tokens,
)
from pullfill.runtime import log
from pullfill.runtime.lifecycle import Tasks, end
from pullfill.wire import QueueSettings, QueueStatus

logger = log.get("queue")

BUSY_REFRESH_S = 0.2
"""Seconds between two counts of the queue, at least. So often it is counted while the server does
not answer, and while the depth keeps jobs local."""
STEADY_REFRESH_S = 1.0
"""The same, at most. Own changes count in between."""
JETSTREAM, STORAGE, PULLS = "jetstream", "storage", "pulls"
"""The parts of the server's health: whether it counts jobs, stores them, and answers pulls."""
_STORES_NOTHING = (
    "answers but stores no jobs: look in its log. If its disk is full, make room, then restart it. "
    "Until then prompts are prefilled locally"
)


# ---------------------------------------------------------------------- the decode worker's side


class JetStreamProducer(QueueEnd):
    """The decode worker's end. `depth`, `look_again` and `available` may be used on any thread.

    Circuit breaker: one publish or count without an answer opens it. Then `available` is False and
    nothing is published. The next count that is answered closes it. So a server that hangs costs
    one `publish_timeout_s`, once.

    health: of the connection. Here: whether the server counts (JETSTREAM) and stores jobs."""

    def __init__(self, connection: NatsConnection, names: Names, settings: QueueSettings) -> None:
        super().__init__(connection, names, settings)
        self._depth = DepthCache()
        self._answering = False
        self._holds, self._held_until = Backoff(BUSY_REFRESH_S, longest_s=30.0), -math.inf
        self._loop = asyncio.get_running_loop()
        self._kick = asyncio.Event()
        self._cancels = asyncio.Semaphore(64)  # NATS would not answer thousands in time
        self._watcher: asyncio.Task[None] | None = None

    async def close(self) -> None:
        await end(self._watcher)
        self._answering = False
        await super().close()

    def depth(self) -> QueueStatus:
        """Return the jobs and tokens that are pending or in flight. Does no I/O.

        The figures come from a cache. While the queue moves it is at most about 1 s old. Own
        publishes, commits and cancels count at once. Tokens are rounded up by at most 1/16 per job.
        While the server is away, this is the last known state."""
        return self._depth.status()

    @property
    def available(self) -> bool:
        """Whether the server answered lately. If not, do not try to publish."""
        answers = self._answering and self.connection.up
        return answers and SYSTEM_CLOCK.monotonic() >= self._held_until

    def look_again(self) -> None:
        """Count the depth soon. Call it if `depth` kept a job local."""
        if not self._kick.is_set():
            self._loop.call_soon_threadsafe(self._kick.set)

    async def publish(
        self, job_id: str, body: bytes, tokens: int, urgency: Urgency = Urgency.NORMAL
    ) -> Receipt:
        """Store one job durably. The same `job_id` again is a duplicate, not a second job.

        tokens: number of tokens to compute.

        Raises QueueFull (a limit is reached, or the body is larger than the server takes: then not
        `retryable`), QueueUnavailable (no answer within `publish_timeout_s`; at once while
        `available` is False). After QueueUnavailable the job may be stored all the same. Then a
        worker pulls it, and its claim must be refused."""
        if not self.available:
            raise QueueUnavailable("the job queue does not answer now")
        stream_id, subject = self.stream_id, self.names.job(tokens, urgency)
        headers = {MSG_ID: job_id, EXPECTED_STREAM: self.names.stream}
        try:
            reply = await self.connection.request(subject, body, self.publish_timeout_s, headers)
            answer = read_reply(reply)
        except QueueUnavailable as exc:
            if isinstance(exc, ApiError) and exc.full:
                raise QueueFull(f"the job queue is full: {exc.description}") from exc
            if self._answering and not isinstance(exc, ApiError | NotSent):
                self._hold()
            self._trip(exc)
            raise
        self._holds.reset()
        self.health.ok(STORAGE)
        seq, duplicate = int(answer["seq"]), bool(answer.get("duplicate", False))
        if not duplicate:
            self._depth.published(seq, tokens)
        return Receipt(job_id, seq, duplicate, stream_id)

    async def cancel(self, receipt: Receipt) -> bool:
        """Remove a job, pending or in flight. Returns whether it was still there.

        Never raises. While the server is away it returns False, and the job stays. A worker that
        pulls it later must be refused the claim."""
        self.committed(receipt)
        async with self._cancels:
            if self._answering and receipt.stream_id == self.stream_id:
                try:
                    return await delete_message(
                        self.connection, self.names.stream, receipt.seq, self.publish_timeout_s
                    )
                except QueueUnavailable as exc:
                    self._trip(exc)
        return False

    def gone(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Return those whose message the queue has no more, so that nobody will be given the job.

        As of the last count. Does no I/O."""
        return [one for one in receipts if self._depth.lost(one.seq, one.stream_id)]

    def claimed(self, receipt: Receipt) -> None:
        """Note that the job waits no longer: a prefill worker has it."""
        if receipt.stream_id == self._depth.snapshot.stream_id:
            self._depth.claimed(receipt.seq)

    def committed(self, receipt: Receipt) -> None:
        """Stop counting the job in `depth`. It is done, and its message will be acked soon."""
        # Not our `stream_id`: there is none while the stream has no leader.
        if receipt.stream_id == self._depth.snapshot.stream_id:
            self._depth.ended(receipt.seq)

    async def nak(self, ack_subject: str, receipt: Receipt | None) -> None:
        """NAK a delivery on behalf of a worker that died with it.

        receipt: of the job. Without one, or if the stream was made anew since, nothing is sent, and
        the job is delivered again after `ack_wait_s`.

        Raises BadMessage if `ack_subject`, which came over the network, is not of this queue and
        this job."""
        ack = parse_ack(ack_subject)
        if ack.stream != self.names.stream:
            raise BadMessage(f"ack subject of another queue: {ack_subject[:200]!r}")
        if receipt is None or receipt.stream_id != self.stream_id:
            return
        if ack.seq != receipt.seq:
            raise BadMessage(f"ack subject of another job: {ack_subject[:200]!r}")
        if self.connection.up:
            with contextlib.suppress(NotSent):
                await self.connection.publish(ack_subject, b"-NAK")

    # ------------------------------------------------------------------ breaker and depth

    async def _connected(self) -> None:
        if self._watcher is None:  # over a later connection the watcher does this
            await self.ensure()
            await self._look()
            self._watcher = asyncio.create_task(self._watch(), name="queue-watch")

    def _on_down(self) -> None:
        super()._on_down()
        self._answering = False

    def _hold(self) -> None:
        """Publish nothing for a while, after a publish without an answer.

        A server whose disk is full answers counts, and stores no job, until somebody restarts it.
        So the pause doubles until a publish is answered."""
        hold_s = self._holds.next()
        self._held_until = SYSTEM_CLOCK.monotonic() + hold_s
        if hold_s > 2 * BUSY_REFRESH_S and not self.health.error(STORAGE):
            logger.warning("NATS at %s %s", self.connection.shown_url, _STORES_NOTHING)
            self.health.failed(_STORES_NOTHING, STORAGE)

    def _trip(self, why: Exception) -> None:
        if self._answering:
            logger.warning(
                "the job queue does not answer (%s). Until it does, prompts are prefilled locally",
                why,
            )
        self._answering = False
        self.health.failed(str(why), JETSTREAM)
        self._kick.set()

    async def _watch(self) -> None:
        while True:
            await self._pause()
            if not self.connection.up:
                await self.connection.wait_up(STEADY_REFRESH_S)
                continue
            try:
                await self._look()
            except (QueueUnavailable, ConfigError) as exc:
                self._trip(exc)
            except Exception as exc:  # without this task the breaker would stay open
                logger.exception("a reply of the job queue could not be handled")
                self._trip(exc)

    async def _look(self) -> None:
        """Count the queue. If the server answers, close the breaker."""
        if not self.stream_id:
            await self.ensure()
        asked_at = SYSTEM_CLOCK.monotonic()
        try:
            holes = self._depth.snapshot.num_holes <= MAX_HOLES
            snapshot = await ask_depth(
                self.connection, self.names, self.publish_timeout_s, holes=holes
            )
        except ApiError as exc:
            if exc.err_code == STREAM_NOT_FOUND:
                self.stream_id = ""
            raise
        self._depth.store(snapshot, asked_at)
        self.stream_id = snapshot.stream_id
        if not self._answering and self._watcher is not None:
            logger.info("the job queue answers again")
        self._answering = True
        self.health.ok(JETSTREAM)

    async def _pause(self) -> None:
        """Sleep until the next count is due. A count costs as much as a job."""
        await asyncio.sleep(BUSY_REFRESH_S)
        if self._answering:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEADY_REFRESH_S - BUSY_REFRESH_S):
                    await self._kick.wait()
        self._kick.clear()


# ---------------------------------------------------------------------- the prefill worker's side

REQUEST_S = 2.0
"""How long a pull request waits on the server."""
GRACE_S = 1.0
"""If no answer comes within this time after a request has expired, the server counts as hung."""
_FOUND_NOTHING = frozenset({"404", "408"})


class JetStreamConsumer(QueueEnd):
    """The prefill worker's end.

    A pull first asks for a job that is there now, one urgency after another. If there is none, it
    asks the consumers of all urgencies at once. Requests that still wait when a job has come are
    for the next pull, or are taken back if none follows at once.

    health: of the connection. Here: whether the server answers pulls (PULLS)."""

    def __init__(self, connection: NatsConnection, names: Names, settings: QueueSettings) -> None:
        super().__init__(connection, names, settings)
        self.letters = DeadLetters(self.connection, self.names)
        self._turns = Turns()
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._arrived: deque[JetStreamDelivery] = deque()
        # Requests without an answer, and when each counts as unanswered.
        self._live: dict[Urgency, float] = {}
        # Those whose consumer did not answer, or not as it should. They are asked again once
        # `_repair` has looked after the stream.
        self._broken: set[Urgency] = set()
        self._wake = asyncio.Event()
        self._draining = self._known = self._pulling = False
        self._repairing: asyncio.Task[None] | None = None
        self._tasks = Tasks()

    async def close(self) -> None:
        """Take no more jobs. Returns once the server has read all acks, or after about 1 s."""
        await end(self._repairing)
        await self.drain()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.connection.up:
            await self.connection.flush()
        await super().close()

    async def drain(self) -> None:
        """Take no more jobs. What is delivered from now on goes to other workers at once."""
        self._draining = True
        self._wake.set()
        await self._withdraw()

    # ------------------------------------------------------------------ pull

    async def pull(self, wait_s: float) -> Delivery | None:
        """Return one job. Waits for it, at most `wait_s`. None: there is none, or after `drain`.

        Raises QueueUnavailable if the server cannot be reached within `wait_s`. A pull that is
        cancelled gives back what it has taken. Between two pulls that do not follow each other at
        once, no job is kept for this worker."""
        job: JetStreamDelivery | None = None
        self._pulling = True
        try:
            job = await self._next(wait_s)
        except QueueUnavailable as exc:
            # Then it is JetStream that does not work. `_repair` may know why.
            if self.connection.up and not self.health.error(PULLS):
                self.health.failed(str(exc), PULLS)
            raise
        finally:
            self._pulling = False
            if job is None:
                self._give_back()
                if self._live:
                    await asyncio.shield(self._withdraw())
        if job is not None:
            self._turns.took(job.urgency, job.tokens)
            # An owner that pulls again at once does so before this runs.
            asyncio.get_running_loop().call_soon(self._rest)
        return job

    def _rest(self) -> None:
        """Take nothing more, unless the owner pulls again."""
        if not self._pulling:
            self._give_back()
            if self._live:
                self._withdraw()

    def _give_back(self) -> None:
        """Give back the jobs that have arrived."""
        while self._arrived:
            self._tasks.begin(self._arrived.popleft().nak(), "nak a job")

    async def _next(self, wait_s: float) -> JetStreamDelivery | None:
        """Return one job. None: none came within `wait_s`, or drain. Raises QueueUnavailable."""
        until = asyncio.get_running_loop().time() + wait_s
        if not await self.connection.wait_up(wait_s):
            raise QueueUnavailable(f"NATS at {self.connection.shown_url} is not connected")
        order = self._turns.order()
        if wait_s <= 0:
            self._give_back()
            if self._live:
                await self._withdraw()
        elif self._arrived:  # together with the last one
            return self._arrived.popleft()
        if not self._live:  # else nothing is there now: a request that waits would have brought it
            for urgency in order:
                await self._request(urgency, 0.0)
                while urgency in self._live and not self._arrived:
                    await self._changed(math.inf)
                if self._arrived:
                    return self._arrived.popleft()
        while wait_s > 0 and not self._draining:
            for urgency in order:
                await self._request(urgency, REQUEST_S)
            if not await self._changed(until):
                break
            if self._arrived:
                return self._arrived.popleft()
        if len(self._broken) == len(Urgency):
            raise QueueUnavailable(f"NATS at {self.connection.shown_url} does not answer pulls")
        return None

    async def _request(self, urgency: Urgency, wait_s: float) -> None:
        """Ask a consumer for one job, unless it was asked. Raises NotSent.

        wait_s: how long the request waits on the server. 0: only for a job that is there now."""
        # nats-py's `fetch` is not used: what waits there cannot be withdrawn, and the next job
        # would go to a worker that has no room for it.
        if self._draining or urgency in self._live or urgency in self._broken:
            return
        if self._subscription is None:
            self._inbox = inbox = self.connection.client.new_inbox()

            async def on_message(msg: Msg) -> None:
                self._on_message(msg, inbox)

            self._subscription = await self.connection.client.subscribe(f"{inbox}.*", cb=on_message)
        self._live[urgency] = asyncio.get_running_loop().time() + wait_s + GRACE_S
        how = b'"expires":%d' % int(wait_s * 1e9) if wait_s else b'"no_wait":true'
        await self.connection.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.names.stream}.{consumer_of(urgency)}",
            b'{"batch":1,%b}' % how,
            reply=f"{self._inbox}.{urgency}",
        )

    async def _changed(self, until: float) -> bool:
        """Wait for an answer, or a change of the connection. False: `until` has passed."""
        late = min(self._live.values(), default=math.inf)
        try:
            async with asyncio.timeout_at(min(until, late)):
                await self._wake.wait()
        except TimeoutError:
            if until <= late:
                return False
            self._break(*(one for one, at in self._live.items() if at <= late), why="no answer")
        self._wake.clear()  # afterwards: what comes while a request is sent must not be lost
        return True

    def _on_message(self, msg: Msg, inbox: str) -> None:
        try:
            job = JetStreamDelivery(self, msg)
        except BadMessage:
            urgency = next((one for one in Urgency if msg.subject == f"{inbox}.{one}"), None)
            if urgency in self._live and inbox == self._inbox:
                status = (msg.headers or {}).get("Status", "?")
                if status in _FOUND_NOTHING:
                    self._live.pop(urgency)
                    self.health.ok(PULLS)
                    self._wake.set()
                else:
                    self._break(urgency, why=status)
            return
        self.health.ok(PULLS)
        if inbox == self._inbox and self._live.pop(job.urgency, None) is not None:
            self._arrived.append(job)
            self._wake.set()
        else:  # its request was withdrawn, or given up
            self._tasks.begin(job.nak(), "nak a job")

    def _withdraw(self) -> asyncio.Task[None]:
        """Take the requests back, by leaving the inbox that they name.

        Jobs that the server has sent before it knows still come, and are given back."""
        subscription, self._subscription = self._subscription, None
        self._live.clear()
        return self._tasks.begin(self._leave(subscription), "unsubscribe")

    async def _leave(self, subscription: Subscription | None) -> None:
        if subscription is None:
            return
        with contextlib.suppress(QueueUnavailable, nats.errors.Error, OSError):
            # nats-py's `unsubscribe` would drop what comes meanwhile. Its `drain` writes a PING
            # that may overtake the UNSUB. A request is written after it.
            await self.connection.client._send_unsubscribe(subscription._id)
            await self.connection.api(f"STREAM.INFO.{self.names.stream}", timeout_s=GRACE_S)
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()

    # ------------------------------------------------------------------ connection

    async def _connected(self) -> None:
        if not self._known:
            await self.ensure()
            self._known = True
        else:
            self._break(*Urgency, why="a new connection")
        await self.letters.collect()
        self._tasks.begin(self.letters.sweep(), "look for dead letters")

    def _on_down(self) -> None:
        super()._on_down()
        if self._repairing is not None:
            self._repairing.cancel()
        self._subscription = None
        self._live.clear()
        self._wake.set()

    def _break(self, *urgencies: Urgency, why: str) -> None:
        """Repair the stream after a request got no answer, or an unexpected one: the consumer or
        the stream is gone or has no leader, or the server shuts down."""
        logger.debug("pull ended with %s; checking the stream", why)
        for urgency in urgencies:
            self._live.pop(urgency, None)
            self._broken.add(urgency)
        if self._repairing is None or self._repairing.done():
            self._repairing = asyncio.create_task(self._repair(), name="queue-repair")
        self._wake.set()

    async def _repair(self, again_s: float = 0.5) -> None:
        while self._broken:
            try:
                await self.ensure()
            except (ConfigError, QueueUnavailable) as exc:
                if not self.stream_id:
                    self.health.failed(str(exc), PULLS)
            if self.stream_id:
                self.health.ok(PULLS)
                self._broken.clear()
                self._wake.set()
            await asyncio.sleep(again_s)

    async def tell(self, stream_id: str, ack_subject: str, verdict: bytes) -> None:
        """Send `verdict`, if the server is connected and still has the stream."""
        if self.connection.up and stream_id == self.stream_id:
            with contextlib.suppress(NotSent):
                await self.connection.publish(ack_subject, verdict)


class JetStreamDelivery(Delivery):
    """Settled through the consumer that pulled it. It can be settled after a reconnect, too.

    Raises BadMessage if the message is no delivery."""

    def __init__(self, owner: JetStreamConsumer, msg: Msg) -> None:
        ack = parse_ack(msg.reply)
        job_id = ((msg.headers or {}).get(MSG_ID) or f"seq-{ack.seq}")[:128]
        super().__init__(job_id, msg.data, subject_tokens(msg.subject), ack.number, msg.reply)
        self.urgency = ack.urgency
        self._owner = owner
        # If the server loses its data, the same ack subject may mean another job. Then the stream
        # has another id, and this delivery settles nothing.
        self._stream_id = owner.stream_id
        self._settled = False

    async def ack(self) -> None:
        await self._settle(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._settle(b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"-NAK")

    async def term(self, reason: str) -> None:
        if not self._settled:
            await self._owner.letters.write(self.job_id, reason, self.number, self.body)
            # If it gets lost, the job is delivered again, and the same letter is written once.
            await self._settle(b"+TERM")

    async def _settle(self, verdict: bytes) -> None:
        # The server does not confirm it. If it gets lost, the job is delivered again.
        if not self._settled:
            self._settled = True
            await self._owner.tell(self._stream_id, self.ack_subject, verdict)

    async def in_progress(self) -> None:
        if not self._settled:
            await self._owner.tell(self._stream_id, self.ack_subject, b"+WPI")
