"""Requests that killed decode workers, as all frontends know them.

The key `suspects/{fingerprint}` exists while requests with this fingerprint are refused. It has a
lease of its own, so it ends by itself. `clear` ends it earlier. `probations` has what frontends
tell each other before a request is refused.

Lifecycle of a board: `start` → `left_s` is always current → `close`. No call waits for etcd.
While etcd is away the last known entries stay, and new ones are written again and again until they
would have ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from pullfill.errors import BadMessage
from pullfill.registry import keys, probations
from pullfill.registry.background import Background
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Put, watch_prefix
from pullfill.runtime import log
from pullfill.wire import SuspectRecord, decode, encode

_log = log.get("registry.suspect_records")

MAX_POSTED = 1000
"""Most fingerprints in etcd. A frontend refuses further ones alone, without telling the others."""


class SuspectBoard:
    """See the module.

    frontend: our instance id.
    frontends: returns the number of frontends."""

    def __init__(
        self,
        client: EtcdClient,
        namespace: str,
        frontend: str,
        frontends: Callable[[], int] = lambda: 1,
    ) -> None:
        self._namespace = namespace
        self._client = client
        self._records: dict[str, SuspectRecord] = {}
        self._background = Background(client)
        self.probations = probations.Probations(client, namespace, frontend, frontends)

    def start(self, listener: probations.Listener) -> None:
        """Begin to watch. Entries arrive soon; until then nobody is refused."""
        self._background.run(self._follow(listener), "suspects")
        self.probations.start(listener)

    async def close(self) -> None:
        """End the watch and what is being written. Idempotent."""
        await self.probations.close()
        await self._background.close()

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> list[SuspectRecord]:
        """All entries, the newest last."""
        return sorted(self._records.values(), key=lambda record: record.until)

    def listed(self) -> list[dict[str, object]]:
        """The entries, for people."""
        return [row_of(record) for record in self.records()]

    def left_s(self, fingerprint: str) -> float:
        """Return how long the fingerprint is refused: 0, or at least 1 s while its key lives."""
        record = self._records.get(fingerprint)
        return max(1.0, record.until - time.time()) if record is not None else 0.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None:
        """Refuse the fingerprint at every frontend, for `ttl_s`.

        Returns at once. While etcd does not answer, the write is tried again."""
        if len(self._records) >= MAX_POSTED:
            _log.warning(
                "suspect %s is refused by this frontend only: etcd holds %d already",
                fingerprint,
                MAX_POSTED,
            )
            return
        until = time.time() + ttl_s
        record = SuspectRecord(
            fingerprint=fingerprint, deaths=deaths, prompt_tokens=prompt_tokens, until=until
        )
        key = keys.suspect(self._namespace, fingerprint)
        self._background.run(
            self._background.put(key, encode(record), ttl_s), f"suspect-{fingerprint}"
        )

    async def _follow(self, listener: probations.Listener) -> None:
        prefix = keys.suspects_prefix(self._namespace)
        async for event in watch_prefix(self._client, prefix):
            if isinstance(event, Put):
                try:
                    record = decode(event.value, SuspectRecord)
                except BadMessage as exc:
                    _log.warning("ignoring %s: %s", event.key.decode(errors="replace"), exc)
                    continue
                self._records[record.fingerprint] = record
                name = record.fingerprint
                listener.on_refused_elsewhere(name, self.left_s(name), record.deaths)
            elif isinstance(event, Delete):
                fingerprint = event.key.decode(errors="replace").removeprefix(prefix)
                if self._records.pop(fingerprint, None) is not None:
                    listener.forget(fingerprint)


def row_of(record: SuspectRecord) -> dict[str, object]:
    """One entry of `suspects` in `GET /pullfill/status`."""
    return {
        "fingerprint": record.fingerprint,
        "state": "refused",
        "deaths": record.deaths,
        "prompt_tokens": record.prompt_tokens,
        "left_s": round(max(0.0, record.until - time.time()), 1),
    }


async def posted(client: EtcdClient, namespace: str) -> list[SuspectRecord]:
    """Return what is refused now, for the command line. Unreadable entries are left out."""
    found = []
    for kv in (await client.get_prefix(keys.suspects_prefix(namespace)))[0]:
        with contextlib.suppress(BadMessage):
            found.append(decode(kv.value, SuspectRecord))
    return sorted(found, key=lambda record: record.until)


async def clear(client: EtcdClient, namespace: str, fingerprint: str) -> bool:
    """Allow the fingerprint again, at every frontend. Returns False if it was not refused.

    Raises ConfigError if it cannot be a fingerprint."""
    key = keys.suspect(namespace, fingerprint)
    if await client.get(key) is None:
        return False
    await client.delete(key)
    return True
