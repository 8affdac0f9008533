"""Requests that killed decode workers, as all frontends know them.

`suspects/{fingerprint}` exists while requests with this fingerprint are refused. It hangs on a
lease of its own, so it ends by itself; `clear` ends it before. `deaths/{instance_id}/{frontend}`
says for a minute what a frontend had at a worker that died: two frontends that blame one request
each must not both believe it.

Lifecycle of a board: `start` → `left_s` is always current → `close`. No call waits for etcd but
`testimony`, which takes SETTLE_S and gives up after ASK_S more. Without etcd the last known entries
stay, and what is posted is tried again until it would have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from pullfill import log
from pullfill.errors import BadMessage, PullfillError
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Put, watch_prefix
from pullfill.wire import SuspectRecord, decode, encode

_log = log.get("registry.suspects")

MAX_POSTED = 1000
"""Fingerprints in etcd. A frontend keeps what goes beyond that to itself."""
SETTLE_S = 0.2
"""For other frontends to say what they had at a worker that died."""
ASK_S = 1.0
RETRY_S = 1.0
DEATH_TTL_S = 60


class SuspectBoard:
    """See the module. frontend: our instance id. frontends: how many there are."""

    def __init__(
        self,
        client: EtcdClient,
        namespace: str,
        frontend: str,
        frontends: Callable[[], int] = lambda: 1,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._frontend = frontend
        self._frontends = frontends
        self._records: dict[str, SuspectRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, on_gone: Callable[[str], None]) -> None:
        """Begin to watch. Entries arrive soon; until then nobody is refused. on_gone: told of each
        fingerprint whose key has gone, by its end or by `clear`."""
        self._run(self._follow(on_gone), "suspects")

    async def close(self) -> None:
        """End the watch and what is being written. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def shared(self) -> bool:
        """Whether there are other frontends."""
        return self._frontends() > 1

    def records(self) -> list[SuspectRecord]:
        """All entries, the newest last."""
        return sorted(self._records.values(), key=lambda record: record.until)

    def listed(self) -> list[dict[str, object]]:
        """The entries, for people."""
        return [row_of(record) for record in self.records()]

    def left_s(self, fingerprint: str) -> float:
        """How long it is refused, at least 1 s while its key lives; 0 if it is not."""
        record = self._records.get(fingerprint)
        return max(1.0, record.until - time.time()) if record is not None else 0.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None:
        """Refuse it at every frontend. Returns at once; tried again while etcd does not answer."""
        if len(self._records) >= MAX_POSTED:
            _log.warning("%s stays here: %d suspects are in etcd", fingerprint, MAX_POSTED)
            return
        until = time.time() + ttl_s
        record = SuspectRecord(
            fingerprint=fingerprint, deaths=deaths, prompt_tokens=prompt_tokens, until=until
        )
        key = keys.suspect(self._namespace, fingerprint)
        self._run(self._put(key, encode(record), ttl_s), f"suspect-{fingerprint}")

    def testify(self, instance_id: str, suspects: int, others: int) -> None:
        """Tell other frontends what we had at a worker that was lost and that may have killed it:
        how many suspects, and other requests without an output. Returns at once."""
        key = keys.death(self._namespace, instance_id, self._frontend)
        value = f"{suspects} {others}".encode()
        self._run(self._put(key, value, DEATH_TTL_S), f"death-{instance_id}")

    async def testimony(self, instance_id: str) -> tuple[int, int]:
        """What all other frontends said of that worker, added up; (0, 0) if nobody can say. Takes
        SETTLE_S at least: they notice the loss when we do."""
        await asyncio.sleep(SETTLE_S)
        own = keys.death(self._namespace, instance_id, self._frontend).encode()
        prefix = keys.deaths_prefix(self._namespace, instance_id)
        suspects = others = 0
        with contextlib.suppress(PullfillError, TimeoutError, ValueError):
            async with asyncio.timeout(ASK_S):
                found, _ = await self._client.get_prefix(prefix)
            for kv in found:
                if kv.key != own:
                    first, second = map(int, kv.value.split())
                    suspects, others = suspects + first, others + second
        return suspects, others

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s stopped: %s", task.get_name(), error)

    async def _put(self, key: str, value: bytes, ttl_s: float) -> None:
        end = time.monotonic() + ttl_s
        while (left_s := end - time.monotonic()) > 1:
            try:
                lease, _, _ = await self._client.grant_lease(int(left_s))
                await self._client.put(key, value, lease)
                return
            except PullfillError as exc:
                _log.debug("%s is not stored yet: %s", key, exc)
                await asyncio.sleep(RETRY_S)

    async def _follow(self, on_gone: Callable[[str], None]) -> None:
        prefix = keys.suspects_prefix(self._namespace)
        async for event in watch_prefix(self._client, prefix):
            if isinstance(event, Put):
                try:
                    record = decode(event.value, SuspectRecord)
                except BadMessage as exc:
                    _log.warning("ignoring %s: %s", event.key.decode(errors="replace"), exc)
                    continue
                self._records[record.fingerprint] = record
            elif isinstance(event, Delete):
                fingerprint = event.key.decode(errors="replace").removeprefix(prefix)
                if self._records.pop(fingerprint, None) is not None:
                    on_gone(fingerprint)


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
    """What is refused now, for the command line; unreadable entries are left out."""
    found = []
    for kv in (await client.get_prefix(keys.suspects_prefix(namespace)))[0]:
        with contextlib.suppress(BadMessage):
            found.append(decode(kv.value, SuspectRecord))
    return sorted(found, key=lambda record: record.until)


async def clear(client: EtcdClient, namespace: str, fingerprint: str) -> bool:
    """Allow it again at every frontend. False: it was not refused. Raises ConfigError."""
    key = keys.suspect(namespace, fingerprint)
    if await client.get(key) is None:
        return False
    await client.delete(key)
    return True
