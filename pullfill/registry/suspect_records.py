"""Requests that killed decode workers, as all frontends know them.

The key `suspects/{fingerprint}` exists while requests with this fingerprint are refused. It has a
lease of its own, so it ends by itself. `clear` ends it earlier.

Life of a board: `start` → `left_s` is always current → `close`. No call between waits for etcd.
While etcd is away the last known entries stay. An entry of this frontend is refused at once, and
written again and again until it would have ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pullfill.errors import BadMessage
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.wire import SuspectRecord, decode, encode

_log = log.get("registry.suspect_records")

# Most fingerprints in etcd. A frontend refuses further ones alone, without telling the others.
MAX_POSTED = 1000


class SuspectBoard(Follower):
    """See the module. refuse_s: returns how long a request is refused."""

    def __init__(
        self, client: EtcdClient, namespace: str, refuse_s: Callable[[], float] = lambda: 600.0
    ) -> None:
        super().__init__(client, keys.record(namespace, "suspects"), "the suspects")
        self.refuse_s = refuse_s
        self._entries: dict[str, SuspectRecord] = {}
        # Those that etcd holds: its word counts, and not the time.
        self._stored: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def listed(self) -> list[dict[str, object]]:
        """The entries, for people: `suspects` in `GET /pullfill/status`. Those that end last are at
        the end."""
        now = time.time()
        told = [one for name, one in list(self._entries.items()) if self.left_s(name)]
        return [
            {
                "fingerprint": record.fingerprint,
                "state": "refused",
                "deaths": record.deaths,
                "prompt_tokens": record.prompt_tokens,
                "left_s": round(max(0.0, record.until - now), 1),
            }
            for record in sorted(told, key=lambda record: record.until)
        ]

    def left_s(self, fingerprint: str) -> float:
        """Return how long the fingerprint is refused: 0, or at least 1 s while its key lives."""
        if (record := self._entries.get(fingerprint)) is None:
            return 0.0
        left_s = record.until - time.time()
        if left_s <= 0 and fingerprint not in self._stored:
            del self._entries[fingerprint]
            return 0.0
        return max(1.0, left_s)

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int) -> None:
        """Refuse the fingerprint: here at once, and at every frontend, for `refuse_s`.

        While etcd does not answer, the write is tried again."""
        ttl_s = self.refuse_s()
        record = SuspectRecord(
            fingerprint=fingerprint, deaths=deaths, prompt_tokens=prompt_tokens,
            until=time.time() + ttl_s,
        )  # fmt: skip
        full = len(self._entries) >= MAX_POSTED
        self._entries[fingerprint] = record
        self._stored.discard(fingerprint)
        if full:
            _log.warning(
                "suspect %s is refused by this frontend only: etcd holds %d already",
                fingerprint,
                MAX_POSTED,
            )
            return
        key = self._prefix + fingerprint
        self.write(lambda left_s: self._store(key, record, left_s), key, ttl_s)

    async def _store(self, key: str, record: SuspectRecord, left_s: float) -> None:
        lease = await self._client.grant_lease(math.ceil(left_s))
        await self._client.put(key, encode(record), lease.id)

    def _on_change(self, event: Put | Delete) -> None:
        name = event.key.decode(errors="replace").removeprefix(self._prefix)
        if isinstance(event, Delete):
            self._entries.pop(name, None)
            self._stored.discard(name)
            return
        try:
            record = decode(event.value, SuspectRecord)
        except BadMessage as exc:
            _log.warning("ignoring %s: %s", event.key.decode(errors="replace"), exc)
            return
        self._entries[record.fingerprint] = record
        self._stored.add(record.fingerprint)


async def posted(client: EtcdClient, namespace: str) -> list[dict[str, object]]:
    """Return what is refused now, as `listed`, for the command line."""
    board = await SuspectBoard(client, namespace).start()
    await board.close()
    return board.listed()


async def clear(client: EtcdClient, namespace: str, fingerprint: str) -> bool:
    """Allow the fingerprint again, at every frontend. Returns False if it was not refused."""
    key = keys.record(namespace, "suspects", fingerprint)
    if await client.get(key) is None:
        return False
    await client.delete(key)
    return True
