"""Key-value and lease calls on etcd, with types. Values are bytes.

Lifecycle: `EtcdClient.connect` once per process, `close` at its end. Belongs to one loop.

Each call has a deadline. It raises RegistryUnavailable if etcd does not answer in time, and
ConfigError if etcd refuses. A write that raised may still have happened.

etcd's gateway sends integers as JSON strings and bytes as base64. msgspec reads both as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from pullfill.errors import RegistryUnavailable
from pullfill.registry.gateway import PROBE, EtcdRpc, Failure, LeaseNotFound, RevisionLost

__all__ = ["EtcdClient", "KeepAlive", "KeyValue", "LeaseNotFound", "RevisionLost", "prefix_end"]


class Header(msgspec.Struct, frozen=True):
    """The header of an answer of etcd: which member answered, and the revision of its store.

    date: etcd's clock when it answered, in whole seconds since 1970. 0: unknown.
    """

    cluster_id: int = 0
    member_id: int = 0
    revision: int = 0
    raft_term: int = 0
    date: float = 0.0


class KeyValue(msgspec.Struct, frozen=True):
    """One key and its value.

    lease: the id of its lease. 0: it has none."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0

    @property
    def name(self) -> str:
        return self.key.decode("utf-8", "replace")


class KeepAlive(msgspec.Struct, frozen=True):
    """Answer to a keep-alive. ttl: 0: the lease is gone."""

    header: Header = Header()
    ttl: int = msgspec.field(default=0, name="TTL")


class _Range(msgspec.Struct):
    header: Header = Header()
    kvs: list[KeyValue] | None = None


class _Done(msgspec.Struct):
    header: Header = Header()
    succeeded: bool = False


class _LeaseGranted(msgspec.Struct):
    header: Header = Header()
    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")


class _KeepAliveLine(msgspec.Struct):
    result: KeepAlive | None = None
    error: Failure | None = None


def as_key(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys with `prefix`. b"\\0", etcd's "no end", if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


class EtcdClient(EtcdRpc):
    """See the module. `connect` is the constructor."""

    # ------------------------------------------------------------------ keys

    async def put(self, key: str | bytes, value: bytes, lease_id: int | None = None) -> int:
        """Write one key. Returns its revision. Raises LeaseNotFound if the lease is gone."""
        request = _put(key, value, lease_id)
        done = await self.call("/kv/put", request, _Done)
        return done.header.revision

    async def get(self, key: str | bytes) -> KeyValue | None:
        """The key's value (linearizable), or None."""
        answer = await self.call("/kv/range", {"key": as_key(key)}, _Range)
        return answer.kvs[0] if answer.kvs else None

    async def get_prefix(
        self, prefix: str | bytes, *, revision: int = 0
    ) -> tuple[list[KeyValue], int]:
        """Return all keys with `prefix`, in their order, and the revision of the store.

        revision: read the past, if it is not 0. Raises RevisionLost if it is compacted or not of
        this store."""
        start = as_key(prefix)
        request = {
            "key": start or b"\0",
            "range_end": prefix_end(start),
            "revision": revision,
        }
        answer = await self.call("/kv/range", request, _Range)
        return answer.kvs or [], answer.header.revision

    async def delete(self, key: str | bytes) -> None:
        """Remove one key, if it is there."""
        await self.call("/kv/deleterange", {"key": as_key(key)}, _Done)

    async def put_if(self, key: str, value: bytes, *, mod_revision: int) -> bool:
        """Write if the key is still as it was at `mod_revision` (0: absent). True if written."""
        return await self.put_all([(key, value)], 0, mod_revision)

    async def put_all(
        self, items: Sequence[tuple[str, bytes]], lease_id: int, mod_revision: int | None = None
    ) -> bool:
        """Write several keys, all or none. True if written.

        mod_revision: write only if they are as they were then. None: write in any case."""
        compare = [
            {"key": key.encode(), "target": "MOD", "mod_revision": mod_revision}
            for key, _ in items
            if mod_revision is not None
        ]
        puts = [{"request_put": _put(key, value, lease_id)} for key, value in items]
        done = await self.call("/kv/txn", {"compare": compare, "success": puts}, _Done)
        return done.succeeded

    # ------------------------------------------------------------------ leases

    async def grant_lease(self, ttl_s: int) -> tuple[int, int, Header]:
        """(lease id, seconds granted, header). etcd rounds a TTL below 2 s up to 2."""
        lease = await self.call("/lease/grant", {"TTL": ttl_s, "ID": 0}, _LeaseGranted)
        return lease.id, lease.ttl, self._dated(lease.header)

    async def lease_left_s(self, lease_id: int) -> int:
        """Return how many seconds the lease has left, by etcd's clock. Negative: it is gone."""
        return (await self.call("/lease/timetolive", {"ID": lease_id}, _LeaseGranted)).ttl

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and all keys on it. Raises LeaseNotFound."""
        await self.call("/lease/revoke", {"ID": lease_id}, _Done)

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> KeepAlive:
        """Renew once. If the lease is gone, `ttl` is 0."""
        line = await self.call("/lease/keepalive", {"ID": lease_id}, _KeepAliveLine, timeout_s)
        if line.error is not None:
            failure = self.refused(line.error)
            if isinstance(failure, LeaseNotFound):
                return KeepAlive()
            raise failure
        if line.result is None:
            raise RegistryUnavailable("etcd answered a keep-alive with nothing")
        return msgspec.structs.replace(line.result, header=self._dated(line.result.header))

    def _dated(self, header: Header) -> Header:
        """Return `header` with the date of the answer that was just read."""
        with contextlib.suppress(ValueError):
            date = parsedate_to_datetime(self.last_date).timestamp()
            return msgspec.structs.replace(header, date=date)
        return header

    async def ping(self, timeout_s: float) -> None:
        """Raise RegistryUnavailable unless etcd answers (linearizable) within `timeout_s`."""
        await self.call("/kv/range", PROBE, _Range, timeout_s)


def _put(key: str | bytes, value: bytes, lease_id: int | None) -> dict[str, Any]:
    return {"key": as_key(key), "value": value, "lease": lease_id or 0}
