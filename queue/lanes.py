"""The lanes as one prefill worker knows them, and the notices that tell it of jobs in them.

A free worker waits at NATS for a job that is in no lane. It asks a lane for a job only if it
believes that one waits there. It learns that from:

- notices: plain NATS messages on `{root}.depth.waiting` with the label of a lane. A producer sends
  one after it has stored a job in the lane, and who gives a job of a lane back sends one, too.
- deliveries: NATS writes into each how many jobs of its lane still wait.
- a look: NATS is asked for all lanes every LOOK_S. It finds jobs whose notice was lost, and those
  that NATS delivers again because their worker died.

NATS confirms a job a moment before the consumer of its lane hears of it. Until then it says that
the lane is empty. So a lane that is found empty after a notice is asked once more.

A lane without a consumer counts as empty until its consumer is made, or has a leader again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from nats.aio.msg import Msg

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, ConfigError, QueueUnavailable
from pullfill.queue.delivery import JetStreamDelivery
from pullfill.queue.depth import lanes_in
from pullfill.queue.names import Names
from pullfill.queue.nats_connection import NatsConnection, NotSent
from pullfill.queue.urgency import Lane, Turns, parse_lane
from pullfill.runtime import log
from pullfill.runtime.lifecycle import end

logger = log.get("queue")

LOOK_S, YOUNG_S = 2.0, 0.5
MAKE_S = 0.1
"""How long a pull waits for the consumer of a lane. NATS usually makes one within milliseconds."""
AGAIN_S = 0.05
"""How long after that a lane is asked once more."""


async def send_notice(connection: NatsConnection, names: Names, lane: Lane) -> None:
    """Tell all prefill workers that a job waits in this lane. Never raises."""
    with contextlib.suppress(NotSent):
        await connection.publish(names.notices, lane.label.encode())


class Lanes:
    """Which lanes hold jobs, as one consumer knows it. Used on the consumer's loop only.

    turns: which lane comes next.
    ensure: makes the consumer of a lane if there is none (`Streams.ensure_lane`).
    on_fill: called with a lane in which a job may wait."""

    def __init__(
        self,
        connection: NatsConnection,
        names: Names,
        ensure: Callable[[Lane], Awaitable[None]],
        on_fill: Callable[[Lane], None],
    ) -> None:
        self.turns = Turns()
        self._connection = connection
        self._names = names
        self._ensure = ensure
        self._on_fill = on_fill
        self._noticed: set[Lane] = set()  # lanes to ask once more when they are found empty
        self._making: dict[Lane, asyncio.Task[None]] = {}
        self._looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._delayed: set[asyncio.TimerHandle] = set()
        self._sending: set[asyncio.Task[None]] = set()

    async def subscribe(self) -> None:
        """Listen to notices over a new connection, and look soon for what came before."""
        await self._connection.client.subscribe(self._names.notices, cb=self._on_notice)
        self._looked_at = 0.0

    async def notice(self, lane: Lane, delay_s: float = 0.0) -> None:
        """Tell all prefill workers that a job waits in this lane, after a delay. Never raises."""
        if delay_s > 0:
            self._later(delay_s, self._notice_now, lane)
        else:
            await send_notice(self._connection, self._names, lane)

    def _later(self, delay_s: float, call: Callable[[Lane], None], lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        self._delayed = {timer for timer in self._delayed if timer.when() > loop.time()}
        self._delayed.add(loop.call_later(delay_s, call, lane))

    def _notice_now(self, lane: Lane) -> None:
        task = asyncio.ensure_future(self.notice(lane))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        for timer in self._delayed:
            timer.cancel()
        await end(self._looking, *self._sending, *self._making.values())

    def arrived(self, job: JetStreamDelivery) -> None:
        """Note what a delivery says about its lane."""
        # NATS does not count jobs that it delivers again. They come before new ones.
        if job.lane is not None and (job.pending or job.number > 1):
            self.turns.fill(job.lane)
        elif job.lane is not None:
            self.turns.empty(job.lane)

    async def empty(self, lane: Lane, *, lacks_consumer: bool) -> None:
        """Note that a lane gave no job.

        lacks_consumer: its consumer is missing, or has no leader. Make it in the background, and
        fill the lane then. Wait for MAKE_S at most. If that fails, the next look finds the lane
        again."""
        if not lacks_consumer:
            self._found_empty(lane)
            return
        passed = self.turns.empty(lane)
        if lane not in self._making:
            self._making[lane] = task = asyncio.create_task(self._make(lane, passed))
            task.add_done_callback(lambda _: self._making.pop(lane, None))
            await asyncio.wait({task}, timeout=MAKE_S)

    def _found_empty(self, lane: Lane) -> None:
        passed = self.turns.empty(lane)
        if lane in self._noticed:
            self._noticed.remove(lane)
            self._later(AGAIN_S, partial(self._fill, passed=passed), lane)

    async def _make(self, lane: Lane, passed: int) -> None:
        try:
            await self._ensure(lane)
        except QueueUnavailable as exc:
            logger.debug("lane %s: %s", lane.label, exc)
        except ConfigError as exc:
            logger.error("jobs of lane %s wait: %s", lane.label, exc)
        else:
            self._fill(lane, passed)

    def look_soon(self) -> None:
        """Look in the background, if the last look is LOOK_S old."""
        now = SYSTEM_CLOCK.monotonic()
        idle = self._looking is None or self._looking.done()
        if idle and now - self._looked_at >= LOOK_S:
            self._looking = asyncio.create_task(self.look(), name="queue-look")

    async def look(self, *, if_old: bool = False) -> None:
        """Ask NATS which lanes hold jobs. Errors are not raised.

        if_old: not if the last look is younger than YOUNG_S. Notices tell of jobs since then.
        A lane whose jobs are all in flight is found, too. The first pull from it finds nothing."""
        if if_old and SYSTEM_CLOCK.monotonic() - self._looked_at < YOUNG_S:
            return
        self._looked_at = SYSTEM_CLOCK.monotonic()
        with contextlib.suppress(QueueUnavailable):
            about = f"STREAM.INFO.{self._names.stream}"
            info = await self._connection.api(about, {"subjects_filter": self._names.lanes})
            for lane in lanes_in(info):
                self._fill(lane)

    async def _on_notice(self, msg: Msg) -> None:
        with contextlib.suppress(BadMessage):
            lane = parse_lane(msg.data.decode("ascii", "replace"))
            self._noticed.add(lane)
            self._fill(lane)

    def _fill(self, lane: Lane, passed: int = 0) -> None:
        self.turns.fill(lane, passed)
        self._on_fill(lane)
