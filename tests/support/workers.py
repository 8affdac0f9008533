"""Worker records, memberships and directories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pullfill.registry.client import EtcdClient
from pullfill.registry.membership import Membership
from pullfill.wire import Compat, WorkerRecord, WorkerState
from tests.support.transfer_rigs import COMPAT


def compat(**changes: Any) -> Compat:
    return msgspec.structs.replace(COMPAT, **changes)


def record(instance_id: str, incarnation: str = "i0", **changes: Any) -> WorkerRecord:
    fields: dict[str, Any] = {
        "instance_id": instance_id,
        "incarnation": incarnation,
        "role": instance_id.partition("-")[0],
        "state": WorkerState.READY,
        "model": "demo",
        "compat": COMPAT,
        "host": "127.0.0.1",
        "host_id": "h",
        "pid": 1,
        "started_at": 0.0,
    }
    return WorkerRecord(**(fields | changes))


def member(
    client: EtcdClient,
    namespace: str,
    instance_id: str,
    *,
    ttl_s: int = 2,
    made: list[str] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Membership:
    """A Membership. made: gets each incarnation. changes: of its record."""

    def make(incarnation: str) -> list[WorkerRecord]:
        if made is not None:
            made.append(incarnation)
        return [record(instance_id, incarnation, **(changes or {}))]

    return Membership(client, namespace, ttl_s, make)


class FakeDirectory:
    """The registry's Directory, set by hand."""

    def __init__(self, *records: WorkerRecord) -> None:
        self.members = {one.instance_id: one for one in records}
        self.reachable, self.age_s = True, 0.0
        self._callbacks: list[Callable[[WorkerRecord | None, WorkerRecord | None], None]] = []

    def workers(self, role: str) -> dict[str, WorkerRecord]:
        return {name: record for name, record in self.members.items() if record.role == role}

    def subscribe(self, callback: Any) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def put(self, record: WorkerRecord) -> None:
        old = self.members.get(record.instance_id)
        self.members[record.instance_id] = record
        for callback in self._callbacks:
            callback(old, record)

    def remove(self, instance_id: str) -> None:
        old = self.members.pop(instance_id)
        for callback in self._callbacks:
            callback(old, None)
