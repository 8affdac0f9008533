"""How this process is known to the cluster: a key for each of its sides, on its lease.

Life: `join` → `leave`. Meanwhile the lease is kept alive and our own keys are watched:

- lease revoked: `revoked` is set, and nothing is registered again. The owner drains.
- outage of etcd: the owner serves on. Once etcd answers, we register on a new lease, with a new
  incarnation.
- key deleted or overwritten by hand: it is written again. Membership is the lease, not the keys.
- key written by another process with our id: the one that has started last keeps it. The other one
  revokes its own lease.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pullfill.backoff import Backoff
from pullfill.clock import boot_s
from pullfill.errors import (
    BadMessage,
    ConfigError,
    IncompatibleError,
    PullfillError,
    RegistryUnavailable,
)
from pullfill.ids import new_incarnation
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient, Header, LeaseNotFound
from pullfill.registry.directory import refuse_if_incompatible
from pullfill.registry.watch import Put, Synced, watch_prefix
from pullfill.runtime import log
from pullfill.runtime.lifecycle import end
from pullfill.wire import WorkerRecord, WorkerState, decode, encode

_log = log.get("registry.membership")


# --------------------------------------------------------------------------- the lease


@dataclass(slots=True)
class LeaseJudge:
    """Tells a lease that somebody has revoked from one that an outage of etcd has cost. No I/O.

    It was revoked only if nothing else can have ended it since the last answered keep-alive.
    Everything else is an outage. Times are clock seconds."""

    # A worker that registers again for no reason loses nothing. One that drains for no reason does.
    ttl_s: float
    # When the last answered keep-alive was sent.
    last_ok: float
    # The header of its answer.
    header: Header
    # When the conversation with etcd last broke. None: not since `last_ok`.
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

    def revoked(self, now: float, header: Header) -> bool:
        """Whether somebody has revoked the lease, of which etcd says that it does not exist."""
        before = self.header
        return (
            # No keep-alive failed and no watch broke. The owner watches its own key, so it sees
            # when etcd restarts between two keep-alives (`interrupted`).
            self.broken_at is None
            # The keep-alive was *sent* less than a TTL ago, so the lease cannot have expired by
            # itself. CLOCK_BOOTTIME goes on while this process is stopped or the machine sleeps.
            and not self.expired(now)
            # In a paused virtual machine all clocks stand still, but etcd's does not. If it was
            # set back, the difference says nothing about the time that passed.
            and 0 <= header.date - before.date < self.ttl_s
            # The same store answers.
            and header.cluster_id == before.cluster_id
            and header.raft_term == before.raft_term
            and header.revision >= before.revision
        )


class EtcdLease:
    """Keeps a lease alive, and says how it ended.

    Life: `grant` → a keep-alive about every TTL/3 → `was_revoked` returns, or the owner calls
    `revoke`. A `Membership` owns it.

    id: etcd's lease id."""

    def __init__(self, client: EtcdClient, lease_id: int, judge: LeaseJudge) -> None:
        self._client = client
        self._judge = judge
        self._nudge = asyncio.Event()
        self.id = lease_id
        self._task = asyncio.create_task(self._keep(), name=f"lease-{lease_id:x}")

    @classmethod
    async def grant(cls, client: EtcdClient, ttl_s: int) -> EtcdLease:
        """A new lease, which is kept alive. Raises RegistryUnavailable."""
        sent_at = boot_s()
        lease = await client.grant_lease(ttl_s)
        return cls(client, lease.id, LeaseJudge(float(lease.ttl), sent_at, lease.header))

    async def was_revoked(self) -> bool:
        """Return once the lease has ended: whether somebody has revoked it. Else an outage of etcd
        has cost it. If the caller is cancelled, the lease goes on."""
        return await asyncio.shield(self._task)

    def check_now(self) -> None:
        """Ask etcd now whether the lease lives. Call it when its key is gone."""
        self._nudge.set()

    def interrupted(self) -> None:
        """A stream of the owner to the same etcd broke."""
        self._judge.broke(boot_s())
        self._nudge.set()

    async def revoke(self) -> None:
        """End the keep-alives and the lease. Does not raise if etcd does not answer."""
        await end(self._task)
        try:
            await self._client.revoke_lease(self.id)
        except PullfillError as exc:
            _log.info("lease %x not revoked, it expires by itself: %s", self.id, exc)

    async def _keep(self) -> bool:
        judge, interval = self._judge, self._judge.ttl_s / 3
        delay = 0.0
        while True:
            # Not wait_for: on 3.11 it swallows a cancellation that comes with the nudge.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay or interval):
                    await self._nudge.wait()
            self._nudge.clear()
            sent_at = boot_s()
            try:
                answer = await self._client.keep_alive(self.id, timeout_s=min(interval, 2.0))
            except Exception as exc:
                if not isinstance(exc, PullfillError):
                    _log.exception("keep-alive failed in an unforeseen way")
                now = boot_s()
                judge.broke(now)
                if judge.expired(now):
                    return False
                _log.debug("keep-alive failed, trying again: %s", exc)
                delay = max(0.01, min(0.2, judge.last_ok + judge.ttl_s - now))
                # A nudge must not turn failing keep-alives into a busy loop.
                self._nudge.clear()
                continue
            if answer.ttl <= 0:
                return judge.revoked(boot_s(), answer.header)
            judge.alive(sent_at, answer.header)
            delay = 0.0


# --------------------------------------------------------------------------- the registration

Make = Callable[[str], list[WorkerRecord]]


@dataclass(eq=False, repr=False)
class Membership:
    """See the module.

    ttl_s: whole seconds (etcd's floor is 2).
    make: called on the loop with a new incarnation. Returns the records to publish, one for each
        side. Their `state` is replaced.
    lease: our lease, which lives as far as we know. None: not registered.
    incarnation: of the last registration. Empty before `join`.
    checking: whether the record of this role says `checking` in place of `ready`. `refresh` follows
        a change.
    revoked: set when somebody has revoked our lease.
    """

    client: EtcdClient
    namespace: str
    ttl_s: int
    make: Make
    checking: Callable[[str], bool] = lambda _: False
    lease: EtcdLease | None = None
    incarnation: str = ""
    revoked: asyncio.Event = field(default_factory=asyncio.Event)
    _state: WorkerState = WorkerState.READY
    _task: asyncio.Task[None] | None = None
    _records: list[WorkerRecord] = field(default_factory=list)
    _stale: asyncio.Event = field(default_factory=asyncio.Event)

    async def join(self, wait_s: float = 0.0) -> None:
        """Register. While etcd does not answer, try again for `wait_s`.

        Raises IncompatibleError (field, both values, who) and RegistryUnavailable. Then nothing is
        registered."""
        incarnation = new_incarnation()
        records = self.make(incarnation)
        give_up, backoff = boot_s() + wait_s, Backoff(longest_s=1.0)
        while True:
            try:
                await refuse_if_incompatible(self.client, self.namespace, records[0])
                await self._register(incarnation, records)
                break
            except RegistryUnavailable as exc:
                # etcd may go away while a worker loads its model.
                if boot_s() >= give_up:
                    raise
                _log.warning("not registered yet: %s", exc)
                await asyncio.sleep(backoff.next())
        self._task = asyncio.create_task(self._run(), name="membership")

    def note_state(self, state: WorkerState) -> None:
        """Publish `state`, at once if etcd answers. Otherwise it is written once etcd does."""
        self._state = state
        self.refresh()

    def refresh(self) -> None:
        """Write our keys again soon."""
        self._stale.set()

    async def leave(self, timeout_s: float = 2.0) -> None:
        """Try to revoke our lease, for `timeout_s`. Idempotent. Does not set `revoked`."""
        await end(self._task)
        self._task = None
        lease, self.lease = self.lease, None
        if lease is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await lease.revoke()

    # ------------------------------------------------------------------ registering

    async def _register(self, incarnation: str, records: list[WorkerRecord]) -> None:
        """Write the records on a new lease.

        Then look again: of two that joined at the same moment and do not fit, the later leaves."""
        lease = await EtcdLease.grant(self.client, self.ttl_s)
        try:
            self._records = records
            await self._write(lease)
            await refuse_if_incompatible(self.client, self.namespace, records[0], registered=True)
        except BaseException:
            await lease.revoke()
            raise
        self.lease, self.incarnation = lease, incarnation
        _log.info("registered %s as %s", records[0].instance_id, incarnation[:8])

    def _key(self, record: WorkerRecord) -> str:
        return keys.worker(self.namespace, record.role, record.instance_id)

    def _expected(self, record: WorkerRecord) -> bytes:
        """What the key of one of our records must hold."""
        state = self._state
        if state is WorkerState.READY and self.checking(record.role):
            state = WorkerState.CHECKING
        return encode(msgspec.structs.replace(record, state=state))

    async def _write(self, lease: EtcdLease) -> None:
        for record in self._records:
            await self.client.put(self._key(record), self._expected(record), lease.id)

    # ------------------------------------------------------------------ holding

    async def _run(self) -> None:
        while self.lease is not None:
            revoked = await self._hold(self.lease)
            self.lease = None
            if revoked:
                _log.warning("our lease was revoked: draining")
                self.revoked.set()
                return
            _log.warning(
                "lost our lease to an etcd outage (TTL %g s): serving goes on; registering again "
                "as soon as etcd answers",
                self.ttl_s,
            )
            await self._reregister()

    async def _hold(self, lease: EtcdLease) -> bool:
        helpers = [asyncio.create_task(self._watch(lease, record)) for record in self._records]
        helpers.append(asyncio.create_task(self._rewrite(lease)))
        try:
            return await lease.was_revoked()
        finally:
            await end(*helpers)

    async def _watch(self, lease: EtcdLease, record: WorkerRecord) -> None:
        """Watch the key of one of our records. What others have changed is written again.

        The lease is told of a broken stream and of a key that is gone."""
        key = self._key(record)
        seen: bytes | None = None
        synced = False
        async for event in watch_prefix(self.client, key, on_break=lease.interrupted):
            if isinstance(event, Synced):
                synced = True
            elif event.key != key.encode():
                continue  # of a worker whose name begins like ours
            elif isinstance(event, Put):
                seen = event.value
                if self._replaced(record, seen):
                    with contextlib.suppress(PullfillError):  # the next event tries again
                        await self.client.revoke_lease(lease.id)
                    lease.check_now()
                    continue
            else:
                seen = None
                lease.check_now()
            if synced and seen != self._expected(record):
                self._stale.set()

    def _replaced(self, record: WorkerRecord, value: bytes) -> bool:
        """Whether a process with our id that has started after us has written this."""
        try:
            other = decode(value, WorkerRecord)
        except BadMessage:  # written by hand
            return False
        if other.started_at <= record.started_at:
            return False
        _log.error(
            "another worker is called %s, too (host %s, pid %d), and has started later: leaving. "
            "Give each an id of its own",
            other.instance_id, other.host, other.pid,
        )  # fmt: skip
        return True

    async def _rewrite(self, lease: EtcdLease) -> None:
        """Write our keys again each time `_stale` is set. Nothing else writes meanwhile."""
        backoff = Backoff(longest_s=1.0)
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._write(lease)
                backoff.reset()
            except LeaseNotFound:
                lease.check_now()
            except PullfillError as exc:
                _log.debug("not written yet: %s", exc)
                self._stale.set()
                backoff.next()
            # What is set meanwhile is written together.
            await asyncio.sleep(backoff.pause_s)

    async def _reregister(self) -> None:
        """Register until it works. Each outage makes one new incarnation, once etcd answers."""
        backoff, made, last = Backoff(longest_s=1.0), None, ""
        while True:
            try:
                if made is None:
                    await self.client.ping(1.0)
                    incarnation = new_incarnation()
                    made = incarnation, self.make(incarnation)
                await self._register(*made)
                _log.warning("registered again as %s", self.incarnation[:8])
                return
            except (IncompatibleError, ConfigError) as exc:
                if str(exc) != last:
                    _log.error("cannot register again, serving without a registration: %s", exc)
                last = str(exc)
            except RegistryUnavailable as exc:
                _log.debug("not registered again yet: %s", exc)
            except Exception:
                _log.exception("registering again failed; retrying")
            await asyncio.sleep(backoff.next())
