"""All parts of an elastic worker, as worker/process.py sees them: the sides that serve now.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pullfill.elastic.switch import Switch
from pullfill.errors import BadMessage
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.runtime.health import UP
from pullfill.runtime.lifecycle import end
from pullfill.wire import RegionDescriptor, RoleOrder, WorkerRecord, decode
from pullfill.worker.process import Service

logger = log.get("elastic")


class ElasticService(Service):
    """Follows orders (RoleOrder in etcd), and passes everything else to the sides that serve."""

    def __init__(self, switch: Switch, etcd: EtcdClient, namespace: str, instance_id: str) -> None:
        self._switch = switch
        self._key = keys.role_order(namespace, instance_id).encode()
        self._orders = Follower(etcd, self._key.decode(), "the role orders", self._on_order)
        self._following: asyncio.Task[None] | None = None

    def describe(self, record: WorkerRecord) -> tuple[WorkerRecord, list[RegionDescriptor]]:
        raise AssertionError("each side has a record of its own")

    async def start(self, note: Callable[[], None]) -> None:
        self._following = asyncio.create_task(self._switch.run(), name="role switch")
        await self._orders.start()

    def checking(self) -> str:
        return "; ".join(filter(None, (service.checking() for service in self._serving)))

    def _on_order(self, event: Put | Delete) -> None:
        if not isinstance(event, Put) or event.key != self._key:
            return
        try:
            self._switch.order(decode(event.value, RoleOrder).role.names)
        except BadMessage as exc:
            logger.warning("an order to change the role cannot be read: %s", exc)

    @property
    def _serving(self) -> list[Service]:
        return [side.service for side in self._switch.serving if side.service is not None]

    def reasons(self) -> list[str]:
        reasons = [reason for service in self._serving for reason in service.reasons()]
        return reasons + ([f"it {self._switch.told}"] if self._switch.told else [])

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": self._switch.roles}
        for service in self._serving:
            told |= service.told()
        return told

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = {}
        load: dict[str, Any] = {"elastic": self._switch.roles or "none"}
        if self._switch.told:
            load["switch"] = self._switch.told
        for service in reversed(self._serving):
            found = service.status()
            load = found.pop("load", {}) | load
            status |= found
        return {**status, "load": load}

    def jobs(self) -> dict[str, Any]:
        return {key: found for service in self._serving for key, found in service.jobs().items()}

    def refresh_metrics(self) -> None:
        # The gauge belongs to the process. A side that rests has closed its connection to NATS, and
        # that has set the gauge to 0.
        for name, server in self.status().get("servers", {}).items():
            UP.labels(name).set(server["up"])
        for side in self._switch.sides:
            if side.last is not None:  # gauges of a side that rests must not keep old values
                side.last.refresh_metrics()

    def engine_stuck(self, stuck: bool) -> None:
        for service in self._serving:
            service.engine_stuck(stuck)

    async def stop_taking(self) -> None:
        await self._orders.close()
        await end(self._following)
        await asyncio.gather(*(side.stop_taking() for side in self._switch.serving))

    async def finished(self) -> None:
        await asyncio.gather(*(service.finished() for service in self._serving))

    async def give_up(self) -> None:
        await asyncio.gather(*(service.give_up() for service in self._serving))

    async def engine_gone(self) -> None:
        await self._orders.close()
        await end(self._following)
        await asyncio.gather(*(service.engine_gone() for service in self._serving))
