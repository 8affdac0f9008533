"""Who is in the cluster: a watched copy of the worker records, and descriptors on demand.

Life: `start`, which returns once the first snapshot is in, → `close`. asyncio thread only.

An outage of etcd ends no worker, so a missing key alone removes no member then:

- While etcd does not answer, the members stay as last known.
- If a key goes within `ttl_s + 2` s of the last failed call or broken stream, the worker stays a
  member for that long. It may have lost its lease to the outage, and register again.
- Otherwise the worker has drained or died, and is removed at once.

etcd is asked whenever it has not answered anything for _BEAT_S. So an etcd that hangs is noticed
within _BEAT_S + _PING_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import BadMessage, IncompatibleError, PeerUnavailable, PullfillError
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.orders import decode_worker_record
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.runtime.lifecycle import end
from pullfill.wire import Compat, RegionDescriptor, WorkerRecord, decode

OnChange = Callable[[WorkerRecord | None, WorkerRecord | None], None]
_log = log.get("registry.directory")
_BEAT_S = 0.7
_PING_S = 1.0
_LOG_EVERY_S = 1.0


class Directory:
    """See the module.

    roles: which workers to watch.
    ttl_s: the lease TTL of the workers.
    beat_s: ask etcd for a sign of life when it has answered nothing for this long."""

    def __init__(
        self,
        client: EtcdClient,
        namespace: str,
        roles: Iterable[str],
        *,
        ttl_s: float = 5.0,
        beat_s: float = _BEAT_S,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._roles = frozenset(roles)
        self._grace_s = ttl_s + 2.0
        self._beat_s = beat_s
        self._members: dict[bytes, WorkerRecord] = {}
        self._leaving: dict[bytes, asyncio.TimerHandle] = {}
        self._malformed: set[bytes] = set()
        self._seldom = log.Seldom(_LOG_EVERY_S)
        self._descriptors: dict[tuple[str, int], RegionDescriptor] = {}
        self._callbacks: list[OnChange] = []
        prefix = keys.workers_prefix(namespace)
        self._follower = Follower(client, prefix, "the list of workers", self._on_event)
        self._beats: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float = 30.0) -> None:
        """Begin to watch. Returns when every worker that is registered now is known.

        Raises RegistryUnavailable after `timeout_s`."""
        self._beats = asyncio.create_task(self._beat(), name="directory-beat")
        await self._follower.start(timeout_s)

    async def close(self) -> None:
        """End the watch. Members stay readable. Idempotent."""
        await self._follower.close()
        await end(self._beats)
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

    def get(self, instance_id: str) -> WorkerRecord | None:
        """The member with this id, whatever its role."""
        return next((r for r in self._members.values() if r.instance_id == instance_id), None)

    def subscribe(self, callback: OnChange) -> Callable[[], None]:
        """Call `callback(old, new)` on the loop for each change. Returns what ends that.

        (None, new): joined. (old, None): gone. Both: changed (compare incarnations)."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    async def descriptor(
        self, instance_id: str, rank: int = 0, *, expect: Compat | None = None
    ) -> RegionDescriptor:
        """Return one rank's memory of a member. Loaded once for each incarnation.

        Raises PeerUnavailable (no such member, or nothing readable published), IncompatibleError
        (`expect` differs; names the field), RegistryUnavailable."""
        found = self._descriptors.get((instance_id, rank))
        if found is None:
            found = await self._load(instance_id, rank)
        if expect is not None and (differences := expect.differs_from(found.compat)):
            field, ours, theirs = differences[0]
            raise IncompatibleError(
                f"the KV memory of {instance_id} rank {rank} does not fit: its {field} is "
                f"{theirs!r}, ours is {ours!r}",
                field=field,
            )
        return found

    async def _load(self, instance_id: str, rank: int) -> RegionDescriptor:
        kv = await self._client.get(keys.descriptor(self._namespace, instance_id, rank))
        # A worker that is both has two records.
        members = [r for r in self._members.values() if r.instance_id == instance_id]
        if not members or kv is None:
            raise PeerUnavailable(f"{instance_id} rank {rank} is not registered (any more)")
        try:
            found = decode(kv.value, RegionDescriptor)
        except BadMessage as exc:
            raise PeerUnavailable(f"the descriptor of {instance_id} cannot be read: {exc}") from exc
        if (found.instance_id, found.rank) != (instance_id, rank):
            raise PeerUnavailable(f"the descriptor at {instance_id} rank {rank} is another's")
        if all(found.incarnation != member.incarnation for member in members):
            # Its record or its descriptor is about to change. A later call finds that they agree.
            raise PeerUnavailable(f"{instance_id} is registering again")
        self._descriptors[instance_id, rank] = found
        return found

    # ------------------------------------------------------------------ following

    def _on_event(self, event: Put | Delete) -> None:
        if isinstance(event, Put):
            self._put(event.key, event.value)
        else:
            self._delete(event.key)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(max(0.05, self._beat_s - self.age_s))
            if self.age_s >= self._beat_s:
                try:
                    await self._client.ping(_PING_S)
                except PullfillError:  # the client has noted the failure
                    await asyncio.sleep(self._beat_s)

    def _put(self, key: bytes, value: bytes) -> None:
        try:
            record = decode_worker_record(self._namespace, key, value)
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

    def _delete(self, key: bytes) -> None:
        self._malformed.discard(key)
        if key not in self._members or key in self._leaving:
            return
        if SYSTEM_CLOCK.monotonic() - self._client.last_failed_at < self._grace_s:
            # Many workers may go at once, and each process would write a line for each of them.
            if (more := self._seldom.due("went")) is not None:
                _log.info("%s went during etcd trouble: waiting for it%s", key.decode(), more)
            self._expect(key, self._grace_s)
        else:
            self._drop(key)

    def _expect(self, key: bytes, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._leaving[key] = loop.call_later(delay_s, self._drop_unless_troubled, key)

    def _drop_unless_troubled(self, key: bytes) -> None:
        """Drop the worker, unless etcd failed again: then it could not register."""
        calm_s = SYSTEM_CLOCK.monotonic() - self._client.last_failed_at
        if calm_s < self._grace_s:
            self._expect(key, self._grace_s - calm_s + 0.01)
        else:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._leaving.pop(key, None)
        self._change(key, None)

    def _change(self, key: bytes, new: WorkerRecord | None) -> None:
        old = self._members.get(key)
        if old == new:
            return
        if new is None:
            del self._members[key]
        else:
            self._members[key] = new
        if old is not None and (new is None or new.incarnation != old.incarnation):
            for cached in [c for c in self._descriptors if c[0] == old.instance_id]:
                del self._descriptors[cached]
        for callback in list(self._callbacks):
            try:
                callback(old, new)
            except Exception:
                _log.exception("a subscriber failed on %s", key.decode())
