"""Who is in the cluster: a watched copy of the worker records.

Life: `start`, which returns once the first snapshot is in, → `close`. asyncio thread only.
While etcd does not answer, the members stay as last known.

The functions above the class ask etcd once, and give orders to single workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, IncompatibleError, OtherVersion, PullfillError
from pullfill.ids import is_name
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient, LeaseNotFound
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.wire import WorkerRecord, decode


def decode_worker_record(namespace: str, key: bytes, value: bytes) -> WorkerRecord:
    """The record at `key`. Raises BadMessage, also if it is of another worker."""
    record = decode(value, WorkerRecord)
    name = f"{record.role}/{record.instance_id}"
    if not all(map(is_name, name.split("/"))):
        raise BadMessage(f"{name!r} is not the name of a worker")
    if key != keys.record(namespace, "workers", name).encode():
        raise BadMessage(f"the record says {name}, its key something else")
    return record


async def live_workers(client: EtcdClient, namespace: str) -> list[tuple[WorkerRecord, int]]:
    """The record and the lease id of all registered workers, oldest first. Unreadable ones are left
    out."""
    workers = []
    found, _ = await client.get_prefix(keys.record(namespace, "workers"))
    for kv in sorted(found, key=lambda kv: kv.create_revision):
        with suppress(BadMessage):
            workers.append((decode_worker_record(namespace, kv.key, kv.value), kv.lease))
    return workers


async def revoke_worker(
    client: EtcdClient, namespace: str, instance_id: str
) -> WorkerRecord | None:
    """Revoke the lease of one worker, which makes it drain. None: no such worker."""
    with suppress(LeaseNotFound):
        for record, lease_id in await live_workers(client, namespace):
            if record.instance_id == instance_id:
                await client.revoke_lease(lease_id)
                return record
    return None


async def refuse_if_incompatible(
    client: EtcdClient,
    namespace: str,
    record: WorkerRecord,
    *,
    registered: bool = False,
) -> None:
    """Raise IncompatibleError, naming the first field that differs from a live worker's.

    A namespace has one wire version, and one model, which is one of the fields. Frontends have no
    KV, so none of the fields.

    registered: our key is in etcd. Only workers whose key is older than ours count."""
    prefix = keys.record(namespace, "workers")
    found, _ = await client.get_prefix(prefix)
    for kv in sorted(found, key=lambda kv: kv.create_revision):
        try:
            theirs = decode_worker_record(namespace, kv.key, kv.value)
        except OtherVersion as exc:
            who = kv.key.decode(errors="replace").removeprefix(prefix).replace("/", " ")
            raise IncompatibleError(
                f"{record.role} {record.instance_id} cannot join namespace {namespace!r}: {who} "
                f"lives there with {exc}, or use another --namespace",
                field="wire",
            ) from exc
        except BadMessage:
            continue
        if theirs.instance_id == record.instance_id:
            if registered:
                return
            continue
        if record.compat is None or theirs.compat is None:
            continue
        if differences := record.compat.differs_from(theirs.compat):
            field, our_value, their_value = differences[0]
            raise IncompatibleError(
                f"{record.role} worker {record.instance_id} cannot join namespace {namespace!r}: "
                f"its {field} is {our_value!r}, but that of {theirs.role} worker "
                f"{theirs.instance_id} on {theirs.host} is {their_value!r}; start it with the same "
                f"{field}, or in another --namespace",
                field=field,
            )


_log = log.get("registry.directory")


class Directory(Follower):
    """See the module.

    Subscribers get (None, new): joined. (old, None): gone. Both: changed (compare incarnations).

    roles: which workers to watch.
    ttl_s: the lease TTL of the workers.
    beat_s: ask etcd for a sign of life when it has answered nothing for this long. So an etcd that
    hangs is noticed a second later."""

    def __init__(
        self,
        client: EtcdClient,
        namespace: str,
        roles: Iterable[str],
        *,
        ttl_s: float = 5.0,
        beat_s: float = 0.7,
    ) -> None:
        super().__init__(client, keys.record(namespace, "workers"), "the list of workers")
        self._namespace = namespace
        self._roles = frozenset(roles)
        self._grace_s = ttl_s + 2.0
        self._beat_s = beat_s
        self._members: dict[bytes, WorkerRecord] = {}
        self._leaving: dict[bytes, asyncio.TimerHandle] = {}
        self._malformed: set[bytes] = set()

    async def start(self, timeout_s: float = 30.0) -> Self:
        """See `Follower`. Every worker that is registered now is known then."""
        self._tasks.begin(self._beat(), "directory-beat")
        return await super().start(timeout_s)

    async def close(self) -> None:
        """End the watch. Members stay readable. Idempotent."""
        await super().close()
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()

    @property
    def reachable(self) -> bool:
        """Whether etcd answered last time it was asked."""
        return self._client.last_ok_at >= self._client.last_failed_at

    @property
    def age_s(self) -> float:
        """Seconds since etcd last answered. The list of workers is at most this old."""
        return SYSTEM_CLOCK.monotonic() - self._client.last_ok_at

    def workers(self, role: str) -> dict[str, WorkerRecord]:
        """Members with `role` by instance id, ready and draining ones."""
        return {r.instance_id: r for r in self._members.values() if r.role == role}

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(max(0.05, self._beat_s - self.age_s))
            if self.age_s >= self._beat_s:
                try:
                    await self._client.ping(1.0)
                except PullfillError:  # the client has noted the failure
                    await asyncio.sleep(self._beat_s)

    def _on_change(self, event: Put | Delete) -> None:
        key = event.key
        if isinstance(event, Delete):
            self._malformed.discard(key)
            if key in self._members and key not in self._leaving:
                self._drop_when_calm(key)
            return
        try:
            record = decode_worker_record(self._namespace, key, event.value)
        except BadMessage as exc:
            if key not in self._malformed:
                self._malformed.add(key)
                _log.warning("ignoring %s: %s", key.decode(errors="replace"), exc)
            return
        self._malformed.discard(key)
        if record.role not in self._roles:
            return
        if (timer := self._leaving.pop(key, None)) is not None:
            timer.cancel()
        self._change(key, record)

    def _drop_when_calm(self, key: bytes) -> None:
        """Drop a worker whose key is gone: it has drained or died.

        An outage of etcd ends no worker. If etcd has failed of late, this one may have lost its
        lease to that, and register again. So it stays a member for a while."""
        self._leaving.pop(key, None)
        if SYSTEM_CLOCK.monotonic() - self._client.last_failed_at < self._grace_s:
            loop = asyncio.get_running_loop()
            self._leaving[key] = loop.call_later(self._grace_s, self._drop_when_calm, key)
        else:
            self._change(key, None)

    def _change(self, key: bytes, new: WorkerRecord | None) -> None:
        old = self._members.get(key)
        if old == new:
            return
        if new is None:
            del self._members[key]
        else:
            self._members[key] = new
        self._tell(old, new)
