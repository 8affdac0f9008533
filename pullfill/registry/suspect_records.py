"""Requests that killed decode workers, as all frontends know them.

The key `suspects/{fingerprint}` exists while requests with this fingerprint are refused. It has a
lease of its own, so it ends by itself. `clear` ends it earlier.

Life of a board: `begin`, until whose first events nobody is refused → `left_s` is always current →
`close`. No call waits for etcd.
While etcd is away the last known entries stay. An entry of this frontend is refused at once, and
written again and again until it would have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pullfill.errors import BadMessage
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.wire import SuspectRecord, decode, encode

_log = log.get("registry.suspect_records")

# Most fingerprints in etcd. A frontend refuses further ones alone, without telling the others.
MAX_POSTED = 1000


@dataclass(slots=True)
class _Entry:
    """until: when it ends, by the loop's clock. stored: etcd has the key, so only that counts."""

    record: SuspectRecord
    until: float
    stored: bool


class SuspectBoard(Follower):
    """See the module. refuse_s: returns how long a request is refused."""

    def __init__(
        self, client: EtcdClient, namespace: str, refuse_s: Callable[[], float] = lambda: 600.0
    ) -> None:
        prefix = keys.suspects_prefix(namespace)
        super().__init__(client, prefix, "the suspects", self._on_change)
        self._refuse_s = refuse_s
        self._namespace = namespace
        self._entries: dict[str, _Entry] = {}
        self._loop = asyncio.get_running_loop()
        self._asking = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def listed(self) -> list[dict[str, object]]:
        """The entries, for people: `suspects` in `GET /pullfill/status`."""
        return _rows((e.record, self.left_s(name)) for name, e in list(self._entries.items()))

    def left_s(self, fingerprint: str) -> float:
        """Return how long the fingerprint is refused: 0, or at least 1 s while its key lives."""
        if (entry := self._entries.get(fingerprint)) is None:
            return 0.0
        left_s = entry.until - self._loop.time()
        if left_s <= 0 and not entry.stored:
            del self._entries[fingerprint]
            return 0.0
        return max(1.0, left_s)

    @property
    def refuse_s(self) -> float:
        return self._refuse_s()

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int) -> None:
        """Refuse the fingerprint: here at once, and at every frontend, for `refuse_s`.

        While etcd does not answer, the write is tried again."""
        ttl_s = self.refuse_s
        record = SuspectRecord(fingerprint=fingerprint, deaths=deaths, prompt_tokens=prompt_tokens)
        full = len(self._entries) >= MAX_POSTED
        self._entries[fingerprint] = _Entry(record, self._loop.time() + ttl_s, stored=False)
        if full:
            _log.warning(
                "suspect %s is refused by this frontend only: etcd holds %d already",
                fingerprint,
                MAX_POSTED,
            )
            return
        key = keys.suspect(self._namespace, fingerprint)
        self.write(lambda left_s: self._store(key, record, left_s), key, ttl_s)

    async def _store(self, key: str, record: SuspectRecord, left_s: float) -> None:
        lease, _, _ = await self._client.grant_lease(math.ceil(left_s))
        await self._client.put(key, encode(record), lease)

    def _on_change(self, event: Put | Delete) -> None:
        name = event.key.decode(errors="replace").removeprefix(self._prefix)
        if isinstance(event, Delete):
            self._entries.pop(name, None)
            return
        try:
            record = decode(event.value, SuspectRecord)
        except BadMessage as exc:
            _log.warning("ignoring %s: %s", event.key.decode(errors="replace"), exc)
            return
        # Refused first: to ask etcd for the time takes a moment.
        entry = self._entries[record.fingerprint] = _Entry(record, 0.0, stored=True)
        key = event.key
        self.write(lambda _: self._ask_time(key, entry), f"time of suspect {name}")

    async def _ask_time(self, key: bytes, entry: _Entry) -> None:
        # One at a time: a frontend that starts is told of up to MAX_POSTED entries at once, and
        # each call that runs has a connection of its own.
        async with self._asking:
            if (found := await self._client.get(key)) is not None:
                entry.until = self._loop.time() + await self._client.lease_left_s(found.lease)


def _rows(found: Iterable[tuple[SuspectRecord, float]]) -> list[dict[str, object]]:
    """What people are shown, those that end last at the end."""
    return [
        {
            "fingerprint": record.fingerprint,
            "state": "refused",
            "deaths": record.deaths,
            "prompt_tokens": record.prompt_tokens,
            "left_s": round(left_s, 1),
        }
        for record, left_s in sorted(found, key=lambda each: each[1])
    ]


async def posted(client: EtcdClient, namespace: str) -> list[dict[str, object]]:
    """Return what is refused now, as `listed`, for the command line. Unreadable entries are left
    out."""
    found = []
    for kv in (await client.get_prefix(keys.suspects_prefix(namespace)))[0]:
        with contextlib.suppress(BadMessage):
            record = decode(kv.value, SuspectRecord)
            found.append((record, max(0.0, await client.lease_left_s(kv.lease))))
    return _rows(found)


async def clear(client: EtcdClient, namespace: str, fingerprint: str) -> bool:
    """Allow the fingerprint again, at every frontend. Returns False if it was not refused.

    Raises ConfigError if it cannot be a fingerprint."""
    key = keys.suspect(namespace, fingerprint)
    if await client.get(key) is None:
        return False
    await client.delete(key)
    return True
