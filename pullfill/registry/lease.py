"""Keeps a lease alive, and says how it ended: revoked by somebody, or lost to an outage of etcd.

Life: `Lease.grant` → `start` (a keep-alive about every TTL/3) → `wait` returns a `LeaseEnd`, or the
owner calls `revoke` or `stop`. A `Membership` owns it.

A lease that is gone was REVOKED only if all of this holds since the last answered keep-alive
(`LeaseJudge`):

- That keep-alive was *sent* less than a TTL ago, so the lease cannot have expired by itself. The
  clock is CLOCK_BOOTTIME, which goes on while this process is stopped or the machine sleeps.
- etcd's own clock (the `Date` of its answers) went on by less than a TTL. In a paused virtual
  machine all other clocks stand still.
- No keep-alive failed and no watch broke. The owner watches its own key, so it sees when etcd
  restarts between two keep-alives (`interrupted`).
- The same store answers: same cluster id and raft term, and a revision that did not go back.

Everything else is an OUTAGE. A worker that registers again for no reason loses nothing. One that
drains for no reason does.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass

from pullfill.clock import BOOT_CLOCK, Clock
from pullfill.errors import PullfillError
from pullfill.registry.client import EtcdClient, Header
from pullfill.runtime import log, timer_grid
from pullfill.runtime.lifecycle import end

_log = log.get("registry.lease")
RETRY_S = 0.2


class LeaseEnd(enum.StrEnum):
    REVOKED = "revoked"
    OUTAGE = "outage"


@dataclass(slots=True)
class LeaseJudge:
    """The rule of the module docstring, without I/O. Times are clock seconds.

    last_ok: when the last answered keep-alive was sent.
    header: of its answer.
    broken_at: when the conversation with etcd last broke. None: not since `last_ok`.
    """

    ttl_s: float
    last_ok: float
    header: Header
    broken_at: float | None = None

    def alive(self, sent_at: float, header: Header) -> None:
        """A keep-alive that was sent at `sent_at` found the lease."""
        self.last_ok, self.header = sent_at, header
        if self.broken_at is not None and sent_at >= self.broken_at:
            self.broken_at = None

    def broke(self, now: float) -> None:
        """A keep-alive failed, or another stream to etcd broke."""
        self.broken_at = now

    def expired(self, now: float) -> bool:
        return now - self.last_ok >= self.ttl_s

    def gone(self, now: float, header: Header) -> LeaseEnd:
        """etcd says that the lease does not exist."""
        before = self.header
        continuous = (
            self.broken_at is None
            and not self.expired(now)
            # If etcd's clock was set back, the difference says nothing about the time that passed.
            and 0 <= header.date - before.date < self.ttl_s
            and header.cluster_id == before.cluster_id
            and header.raft_term == before.raft_term
            and header.revision >= before.revision
        )
        return LeaseEnd.REVOKED if continuous else LeaseEnd.OUTAGE


class Lease:
    """See the module. id: etcd's lease id. ttl_s: as granted."""

    def __init__(self, client: EtcdClient, lease_id: int, judge: LeaseJudge, clock: Clock) -> None:
        self._client = client
        self._judge = judge
        self._clock = clock
        self._nudge = asyncio.Event()
        self._task: asyncio.Task[LeaseEnd] | None = None
        self.id = lease_id

    @classmethod
    async def grant(cls, client: EtcdClient, ttl_s: int, *, clock: Clock = BOOT_CLOCK) -> Lease:
        """A new lease, not yet kept alive. Raises RegistryUnavailable."""
        sent_at = clock.monotonic()
        lease_id, granted_s, header = await client.grant_lease(ttl_s)
        return cls(client, lease_id, LeaseJudge(float(granted_s), sent_at, header), clock)

    @property
    def ttl_s(self) -> float:
        return self._judge.ttl_s

    def start(self) -> None:
        """Begin keep-alives."""
        self._task = asyncio.create_task(self._keep(), name=f"lease-{self.id:x}")

    async def wait(self) -> LeaseEnd:
        """Return how the lease ended. If the caller is cancelled, the lease goes on."""
        assert self._task is not None, "start() first"
        return await asyncio.shield(self._task)

    def check_now(self) -> None:
        """Ask etcd now whether the lease lives. Call it when its key is gone."""
        self._nudge.set()

    def interrupted(self) -> None:
        """A stream of the owner to the same etcd broke."""
        self._judge.broke(self._clock.monotonic())
        self._nudge.set()

    async def stop(self) -> None:
        """End the keep-alives. etcd drops the lease after its TTL."""
        await end(self._task)

    async def revoke(self) -> None:
        """End the keep-alives and the lease. Does not raise if etcd does not answer."""
        await self.stop()
        try:
            await self._client.revoke_lease(self.id)
        except PullfillError as exc:
            _log.info("lease %x not revoked, it expires by itself: %s", self.id, exc)

    async def _keep(self) -> LeaseEnd:
        judge, interval = self._judge, self._judge.ttl_s / 3
        loop, delay = asyncio.get_running_loop(), 0.0
        while True:
            # Not wait_for: on 3.11 it swallows a cancellation that comes with the nudge.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay or timer_grid.left(loop.time(), interval)):
                    await self._nudge.wait()
            self._nudge.clear()
            sent_at = self._clock.monotonic()
            try:
                answer = await self._client.keep_alive(self.id, timeout_s=min(interval, 2.0))
            except Exception as exc:
                if not isinstance(exc, PullfillError):
                    _log.exception("keep-alive failed in an unforeseen way")
                now = self._clock.monotonic()
                judge.broke(now)
                if judge.expired(now):
                    return LeaseEnd.OUTAGE
                _log.debug("keep-alive failed, trying again: %s", exc)
                delay = max(0.01, min(RETRY_S, judge.last_ok + judge.ttl_s - now))
                # A nudge must not turn failing keep-alives into a busy loop.
                self._nudge.clear()
                continue
            if answer.ttl <= 0:
                return judge.gone(self._clock.monotonic(), answer.header)
            judge.alive(sent_at, answer.header)
            delay = 0.0
