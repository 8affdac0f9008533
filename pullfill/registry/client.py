"""Typed key-value and lease calls on etcd. All values are bytes; every call has a deadline.

Lifecycle: `EtcdClient.connect` once per process, `close` at its end; belongs to one loop. Every
method raises RegistryUnavailable when etcd does not answer in `timeout_s` and ConfigError when it
refuses; a write that raised may still have happened. Integers travel as JSON strings, bytes as
base64: that is etcd's gateway, and msgspec reads it as is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import RegistryUnavailable
from pullfill.net.security import OPEN, EtcdSecurity
from pullfill.registry.gateway import PROBE, EtcdRpc, Failure, LeaseNotFound, RevisionLost
from pullfill.runtime.health import Health

__all__ = ["EtcdClient", "KeepAlive", "KeyValue", "LeaseNotFound", "RevisionLost", "prefix_end"]

TIMEOUT_S = 2.0


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
    """One key. `lease` 0: none. `name` is the key as text."""

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
    """Answer to a keep-alive; `ttl` 0: the lease is gone."""

    header: Header = Header()
    ttl: int = msgspec.field(default=0, name="TTL")


class _Range(msgspec.Struct):
    header: Header = Header()
    kvs: list[KeyValue] | None = None


class _Done(msgspec.Struct):
    header: Header = Header()
    succeeded: bool = False


class _Lease(msgspec.Struct):
    header: Header = Header()
    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")


class _KeepAliveLine(msgspec.Struct):
    result: KeepAlive | None = None
    error: Failure | None = None


def as_key(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys with `prefix`; b"\\0" (etcd's "no end") if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


class EtcdClient:
    """See the module. `connect` is the constructor."""

    def __init__(self, rpc: EtcdRpc, timeout_s: float = TIMEOUT_S) -> None:
        self._rpc = rpc
        self._timeout_s = timeout_s

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        wait_s: float = 30.0,
        on_retry: Callable[[str], None] | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
        security: EtcdSecurity = OPEN.etcd,
    ) -> EtcdClient:
        """Connect, trying again for up to `wait_s`; `on_retry` gets one line per failed try.

        Raises RegistryUnavailable with advice after `wait_s`, ConfigError at once for a bad URL or
        credentials that etcd refuses.
        """
        rpc = await EtcdRpc.connect(
            url, wait_s=wait_s, on_retry=on_retry, clock=clock, security=security
        )
        return cls(rpc, timeout_s)

    @property
    def health(self) -> Health:
        """Whether etcd answered the last request, and since when that is so."""
        return self._rpc.health

    @property
    def last_ok_at(self) -> float:
        """Clock seconds of the last answer."""
        return self._rpc.last_ok_at

    @property
    def last_failed_at(self) -> float:
        """Clock seconds of the last failed call or broken stream; -inf before the first."""
        return self._rpc.last_failed_at

    async def _call(
        self, path: str, request: Any, kind: type[Any], timeout_s: float | None = None
    ) -> Any:
        return await self._rpc.call(path, request, kind, timeout_s=timeout_s or self._timeout_s)

    # ------------------------------------------------------------------ keys

    async def put(self, key: str | bytes, value: bytes, lease_id: int | None = None) -> int:
        """Write one key; returns its revision. Raises LeaseNotFound for a lease that is gone."""
        request = _put(key, value, lease_id)
        done: _Done = await self._call("/kv/put", request, _Done)
        return done.header.revision

    async def get(self, key: str | bytes) -> KeyValue | None:
        """The key's current value (linearizable), or None."""
        answer: _Range = await self._call("/kv/range", {"key": as_key(key)}, _Range)
        return answer.kvs[0] if answer.kvs else None

    async def get_prefix(
        self, prefix: str | bytes, *, revision: int = 0
    ) -> tuple[list[KeyValue], int]:
        """All keys with `prefix` in key order, and the store's revision they were read at.

        `revision` > 0 reads the past; RevisionLost if it is compacted or not of this store.
        """
        start = as_key(prefix)
        request = {
            "key": start or b"\0",
            "range_end": prefix_end(start),
            "revision": revision,
        }
        answer: _Range = await self._call("/kv/range", request, _Range)
        return answer.kvs or [], answer.header.revision

    async def delete(self, key: str | bytes) -> None:
        """Remove one key; no error if it is not there."""
        await self._call("/kv/deleterange", {"key": as_key(key)}, _Done)

    async def put_if_absent(
        self, key: str | bytes, value: bytes, lease_id: int | None = None
    ) -> bool:
        """Write unless the key exists. True if written."""
        return await self.put_if(key, value, mod_revision=0, lease_id=lease_id)

    async def put_if(
        self, key: str | bytes, value: bytes, *, mod_revision: int, lease_id: int | None = None
    ) -> bool:
        """Write if the key is still as it was at `mod_revision` (0: absent). True if written."""
        request = {
            "compare": [{"key": as_key(key), "target": "MOD", "mod_revision": mod_revision}],
            "success": [{"request_put": _put(key, value, lease_id)}],
        }
        done: _Done = await self._call("/kv/txn", request, _Done)
        return done.succeeded

    async def put_all_absent(self, items: Sequence[tuple[str, bytes]], lease_id: int) -> bool:
        """Write several keys if none of them exists. True if written."""
        request = {
            "compare": [
                {"key": as_key(key), "target": "MOD", "mod_revision": 0} for key, _ in items
            ],
            "success": [{"request_put": _put(key, value, lease_id)} for key, value in items],
        }
        done: _Done = await self._call("/kv/txn", request, _Done)
        return done.succeeded

    async def put_all(self, items: Sequence[tuple[str, bytes]], lease_id: int | None = None) -> int:
        """Write several keys at once: all or none; returns their revision."""
        request = {"success": [{"request_put": _put(key, value, lease_id)} for key, value in items]}
        done: _Done = await self._call("/kv/txn", request, _Done)
        return done.header.revision

    # ------------------------------------------------------------------ leases

    async def grant_lease(self, ttl_s: int) -> tuple[int, int, Header]:
        """(lease id, seconds granted, header). etcd rounds a TTL below 2 s up to 2."""
        lease: _Lease = await self._call("/lease/grant", {"TTL": ttl_s, "ID": 0}, _Lease)
        return lease.id, lease.ttl, self._dated(lease.header)

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and all keys on it. Raises LeaseNotFound."""
        await self._call("/lease/revoke", {"ID": lease_id}, _Done)

    async def lease_time_to_live(self, lease_id: int) -> int:
        """Seconds left; -1 when the lease is gone."""
        try:
            lease: _Lease = await self._call("/lease/timetolive", {"ID": lease_id}, _Lease)
        except LeaseNotFound:
            return -1
        return lease.ttl

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> KeepAlive:
        """Renew once. etcd answers for a lease that is gone too: then `ttl` is 0."""
        line: _KeepAliveLine = await self._call(
            "/lease/keepalive", {"ID": lease_id}, _KeepAliveLine, timeout_s
        )
        if line.error is not None:
            failure = self._rpc.refused(line.error)
            if isinstance(failure, LeaseNotFound):
                return KeepAlive()
            raise failure
        if line.result is None:
            raise RegistryUnavailable("etcd answered a keep-alive with nothing")
        return msgspec.structs.replace(line.result, header=self._dated(line.result.header))

    def _dated(self, header: Header) -> Header:
        """Return `header` with the date of the answer that was just read."""
        with contextlib.suppress(ValueError):
            date = parsedate_to_datetime(self._rpc.last_date).timestamp()
            return msgspec.structs.replace(header, date=date)
        return header

    # ------------------------------------------------------------------ streams

    def stream(self, path: str, request: Any, *, idle_s: float) -> AbstractAsyncContextManager[Any]:
        """A raw line stream (see `EtcdRpc.stream`); `watch.py` is what callers want."""
        return self._rpc.stream(path, request, open_s=self._timeout_s, idle_s=idle_s)

    async def ping(self, timeout_s: float) -> None:
        """Raise RegistryUnavailable unless etcd answers (linearizable) within `timeout_s`."""
        await self._call("/kv/range", PROBE, _Range, timeout_s)

    async def close(self) -> None:
        """End all connections. Idempotent."""
        await self._rpc.close()


def _put(key: str | bytes, value: bytes, lease_id: int | None) -> dict[str, Any]:
    return {"key": as_key(key), "value": value, "lease": lease_id or 0}
