"""Watches all keys with a prefix, also over restarts of etcd.

`watch_prefix` reads a snapshot at revision R, yields it as `Put`s and a `Synced`, then streams the
changes from R+1. When the stream has ended or is silent, it yields the difference to a new
snapshot, then `Synced` again. So of several changes of one key meanwhile only the last is told.
`Follower` watches in a task of its own. What this process knows of a prefix is a subclass of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import msgspec

from pullfill.backoff import Backoff
from pullfill.errors import ConfigError, PullfillError, RegistryUnavailable
from pullfill.registry.client import Answer, EtcdClient, KeyValue, RevisionLost, range_of
from pullfill.runtime import log
from pullfill.runtime.lifecycle import Tasks, end

_log = log.get("registry.watch")


# A key has a value.
Put = KeyValue


@dataclass(frozen=True, slots=True)
class Delete:
    """A key is gone.

    mod_revision: when. Of a key that a snapshot lacks: the revision of the snapshot."""

    key: bytes
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Synced:
    """What was yielded is what etcd holds."""


WatchEvent = Put | Delete | Synced


async def watch_prefix(
    client: EtcdClient,
    prefix: str,
    *,
    on_break: Callable[[], None] | None = None,
    idle_s: float = 60.0,
    pause_s: float = 0.05,
    refused_s: float = 10.0,
) -> AsyncGenerator[WatchEvent, None]:
    """Yield events of all keys with `prefix`, for ever.

    on_break: called each time a stream breaks or cannot be opened.
    idle_s: a stream that brought nothing for this long is opened anew.
    pause_s: the first pause before a broken stream is opened again.
    refused_s: the pause after etcd has refused it.

    Raises ConfigError if etcd does not let us read there at first. A later refusal counts as an
    outage: an operator may take back what caused it. Then `client.health` says why."""
    part = f"watch of {prefix}"
    known: dict[bytes, KeyValue] | None = None
    backoff = Backoff(pause_s, 0.5)
    try:
        while True:
            try:
                kvs, revision = await client.get_prefix(prefix)
                before, known = known or {}, {kv.key: kv for kv in kvs}
                for key in before.keys() - known.keys():
                    yield Delete(key, revision)
                for kv in kvs:
                    if before.get(kv.key) != kv:
                        yield kv
                yield Synced()
                client.health.ok(part)
                # Closed by hand: a consumer that stops must not leave the connection open.
                async with contextlib.aclosing(
                    _changes(client, prefix, revision, idle_s)
                ) as messages:
                    async for changes in messages:
                        backoff.reset()
                        for event in changes:
                            if isinstance(event, Put):
                                known[event.key] = event
                            else:
                                known.pop(event.key, None)
                            yield event
            except TimeoutError:
                # Silent for idle_s. A half-open connection must not hide changes for longer.
                continue
            except RevisionLost as exc:
                _log.info("%s: %s; reading it again", part, exc)
                await asyncio.sleep(backoff.next())
            except (RegistryUnavailable, ConfigError) as exc:
                if isinstance(exc, ConfigError):
                    if known is None:
                        raise
                    if not client.health.error(part):
                        _log.error("cannot watch %s any more, trying again: %s", prefix, exc)
                    client.health.failed(str(exc), part)
                else:
                    _log.debug("%s broke: %s", part, exc)
                if on_break is not None:
                    on_break()
                # To check a password takes etcd tens of milliseconds of CPU.
                await asyncio.sleep(refused_s if isinstance(exc, ConfigError) else backoff.next())
    finally:
        client.health.ok(part)  # nobody looks there any more


async def _changes(
    client: EtcdClient, prefix: str, revision: int, idle_s: float
) -> AsyncGenerator[list[Put | Delete], None]:
    """Yield the changes after `revision`, message by message."""
    create = {**range_of(prefix), "start_revision": revision + 1}
    answer = client.stream("/watch", {"create_request": create}, idle_s=idle_s)
    async with contextlib.aclosing(answer) as lines:
        async for line in lines:
            try:
                message = msgspec.json.decode(line, type=Answer, strict=False)
            except (msgspec.MsgspecError, ValueError) as exc:
                raise RegistryUnavailable(f"etcd sent no watch message: {exc}") from exc
            result = message.result
            if message.error is not None or result is None:
                raise RegistryUnavailable(f"etcd ended the watch: {message.error}")
            if result.canceled:
                if "permission" in result.cancel_reason:
                    # Maybe only the token is old. Then the next read renews it.
                    raise RegistryUnavailable(f"etcd refused the watch: {result.cancel_reason}")
                why = result.cancel_reason or f"compacted at {result.compact_revision}"
                raise RevisionLost(why)
            if result.header.revision < revision:
                raise RevisionLost("etcd's store is younger than what was read from it")
            yield [
                Delete(one.kv.key, one.kv.mod_revision) if one.type == "DELETE" else one.kv
                for one in result.events or ()
            ]


class Follower:
    """Watches a prefix in a task of its own, and writes there over outages. `close` ends both.

    what: the name of what is there, for people."""

    def __init__(self, client: EtcdClient, prefix: str, what: str) -> None:
        self._client = client
        self._prefix = prefix
        self._what = what
        self._tasks = Tasks()
        self._callbacks: list[Callable[..., object]] = []

    def _on_change(self, event: Put | Delete) -> None:
        """A subclass takes the change. An error ends the watch, and is logged."""

    async def start(self, timeout_s: float = 30.0) -> Self:
        """Begin to watch. Returns itself once all that is in etcd now was told.

        Raises RegistryUnavailable after `timeout_s`."""
        synced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(synced), name=self._what)
        either = asyncio.FIRST_COMPLETED
        try:
            await asyncio.wait({synced, task}, timeout=timeout_s, return_when=either)
            if not synced.done():
                if task.done():
                    await task
                raise RegistryUnavailable(f"etcd did not give {self._what} within {timeout_s:g} s")
        except BaseException:
            task.cancel()  # `close` does not know it yet
            raise
        self._tasks.keep(task)
        return self

    def subscribe(self, callback: Callable[..., object]) -> Callable[[], None]:
        """Call `callback` on the loop at each change. Returns what ends that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def _tell(self, *change: object) -> None:
        """Call the subscribers. What one of them raises harms nobody else."""
        for callback in list(self._callbacks):
            try:
                callback(*change)
            except Exception:
                _log.exception("a subscriber of %s failed", self._what)

    def write(
        self, work: Callable[[float], Awaitable[object]], name: str, for_s: float = math.inf
    ) -> None:
        """Do `work` in the background. While etcd does not answer, try again, for `for_s`.

        work: gets the seconds that are left."""
        self._tasks.begin(self._write(work, name, time.monotonic() + for_s), name)

    async def close(self) -> None:
        """End the watch, and drop what is not written yet. Idempotent."""
        await end(*self._tasks)

    async def _run(self, synced: asyncio.Future[None]) -> None:
        async for event in watch_prefix(self._client, self._prefix):
            if not isinstance(event, Synced):
                self._on_change(event)
            elif not synced.done():
                synced.set_result(None)

    async def _write(
        self, work: Callable[[float], Awaitable[object]], name: str, until: float
    ) -> None:
        while (left_s := until - time.monotonic()) > 0:
            try:
                await work(left_s)
                return
            except PullfillError as exc:
                _log.debug("%s is not written yet: %s", name, exc)
                await asyncio.sleep(1.0)
