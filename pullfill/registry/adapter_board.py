"""LoRA adapters at `adapters/{name}`. All frontends of a cluster serve what is there.

A key has no lease: an adapter stays until a frontend unloads it, also when all frontends restart.

Life: `start`, which returns once all adapters were told → `close`. Single event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from pullfill.errors import BadMessage
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.wire import AdapterRecord, decode, encode

_log = log.get("registry.adapters")
OnChange = Callable[[str, AdapterRecord | None], object]


class AdapterBoard:
    """See the module."""

    def __init__(self, client: EtcdClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._prefix = keys.adapters_prefix(namespace)
        self._known: dict[str, tuple[int, AdapterRecord]] = {}
        self._on_change: OnChange = lambda _name, _record: None
        self._follower = Follower(client, self._prefix, "the LoRA adapters", self._on_event)

    async def start(self, on_change: OnChange, timeout_s: float = 30.0) -> None:
        """Begin to watch. Raises RegistryUnavailable after `timeout_s`.

        on_change: called on the loop with the name of each adapter and its record. None: it is
        unloaded."""
        self._on_change = on_change
        await self._follower.start(timeout_s)

    async def close(self) -> None:
        """End the watch. Idempotent."""
        await self._follower.close()

    async def keep(self, record: AdapterRecord) -> AdapterRecord:
        """Write an adapter over one of the same name. Returns the record, with its number.

        Raises RegistryUnavailable. Then it may have been written."""
        key = keys.adapter(self._namespace, record.name)
        while True:
            found = await self._client.get(key)
            written = None if found is None else _read(key, found.value)
            known = self._known.get(record.name, (0, None))[1]
            last = max(before.number for before in (written, known, record) if before is not None)
            # The clock is for a frontend that has not seen the last number, e.g. of an adapter that
            # was unloaded.
            number = max(last + 1, int(time.time() * 1000))
            record = msgspec.structs.replace(record, number=number)
            revision = 0 if found is None else found.mod_revision
            if await self._client.put_if(key, encode(record), mod_revision=revision):
                return record

    async def look(self, name: str) -> None:
        """Read an adapter that may not have been told yet. Raises RegistryUnavailable."""
        found = await self._client.get(keys.adapter(self._namespace, name))
        if found is not None:
            self._on_event(Put(found.key, found.value, found.mod_revision))

    async def forget(self, name: str) -> None:
        """Remove an adapter. Raises RegistryUnavailable."""
        await self._client.delete(keys.adapter(self._namespace, name))

    def _on_event(self, event: Put | Delete) -> None:
        name = event.key.decode("utf-8", "replace").removeprefix(self._prefix)
        if isinstance(event, Put):
            if (record := _read(name, event.value)) is not None and record.name == name:
                self._known[name] = event.mod_revision, record
                self._on_change(name, record)
            return
        revision, known = self._known.get(name, (0, None))
        if known is not None and event.mod_revision < revision:
            # etcd has lost its data. Nobody has unloaded the adapter.
            key, value = keys.adapter(self._namespace, name), encode(known)
            put = self._client.put_if
            self._follower.write(lambda _: put(key, value, mod_revision=0), f"adapter {name}")
        else:
            self._on_change(name, None)


def _read(name: str, value: bytes) -> AdapterRecord | None:
    try:
        return decode(value, AdapterRecord)
    except BadMessage as exc:
        _log.error("LoRA adapter %s is ignored: %s", name, exc)
        return None
