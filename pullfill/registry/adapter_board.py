"""LoRA adapters at `adapters/{name}`. All frontends of a cluster serve what is there.

A key has no lease: an adapter stays until a frontend unloads it, also when all frontends restart.

Life: `subscribe`, `start`, which returns once all adapters were told → `close`. Single event loop.
"""

from __future__ import annotations

import time

import msgspec

from pullfill.errors import BadMessage
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.wire import AdapterRecord, decode, encode

_log = log.get("registry.adapters")


class AdapterBoard(Follower):
    """See the module. Subscribers get the name of each adapter and its record. None: it is
    unloaded."""

    def __init__(self, client: EtcdClient, namespace: str) -> None:
        super().__init__(client, keys.record(namespace, "adapters"), "the LoRA adapters")
        self._known: dict[str, tuple[int, AdapterRecord]] = {}

    async def keep(self, record: AdapterRecord) -> AdapterRecord:
        """Write an adapter over one of the same name. Returns the record, with its number.

        Raises RegistryUnavailable. Then it may have been written."""
        key = self._prefix + record.name
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
        found = await self._client.get(self._prefix + name)
        if found is not None:
            self._on_change(found)

    async def forget(self, name: str) -> None:
        """Remove an adapter. Raises RegistryUnavailable."""
        await self._client.delete(self._prefix + name)

    def _on_change(self, event: Put | Delete) -> None:
        name = event.key.decode("utf-8", "replace").removeprefix(self._prefix)
        if isinstance(event, Put):
            if (record := _read(name, event.value)) is not None and record.name == name:
                self._known[name] = event.mod_revision, record
                self._tell(name, record)
            return
        revision, known = self._known.get(name, (0, None))
        if known is not None and event.mod_revision < revision:
            # etcd has lost its data. Nobody has unloaded the adapter.
            key, value = self._prefix + name, encode(known)
            put = self._client.put_if
            self.write(lambda _: put(key, value, mod_revision=0), f"adapter {name}")
        else:
            self._tell(name, None)


def _read(name: str, value: bytes) -> AdapterRecord | None:
    try:
        return decode(value, AdapterRecord)
    except BadMessage as exc:
        _log.error("LoRA adapter %s is ignored: %s", name, exc)
        return None
