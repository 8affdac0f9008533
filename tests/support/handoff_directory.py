"""The registry's view for handoff tests, set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pullfill.wire import WorkerRecord


class FakeDirectory:
    """The registry's Directory as far as prefill workers use it."""

    def __init__(self) -> None:
        self.members: dict[str, WorkerRecord] = {}
        self.reachable = True
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
