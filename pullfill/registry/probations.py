"""Frontends tell each other about decode workers that died, and about requests on probation.

A frontend does not see the requests of others. They use these keys under `probations/`:

    deaths/INSTANCE_ID/FRONTEND   the requests without an output that a frontend had at a worker
                                  that died
    of/FINGERPRINT                this request is on probation: nobody else sends one like it
    at/INSTANCE_ID                the same record, by worker: nobody else sends this worker a
                                  request that may be mistaken for the suspect
    clear/INSTANCE_ID/FRONTEND    this frontend has no request without an output there

Life of a probation: `take` creates `of` and `at` together, or neither. It creates none if the
fingerprint is refused (`suspect_records`). Each other frontend stops sending to that worker. It
answers with `clear` once its requests there have shown an output. When all have answered, or after
CLEAR_S, the probation is `ready` and the suspect is sent. `release` ends it. All keys of a
probation hang on one lease, so they also end when their frontend dies.

Without etcd a probation is ready at once: the frontend then knows only its own requests.

Lifecycle: `start` → `close`. No call waits for etcd but `testimony`. Single event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pullfill.errors import BadMessage, PullfillError
from pullfill.registry import keys
from pullfill.registry.background import Background
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Put, Synced, watch_prefix
from pullfill.runtime import log
from pullfill.wire import decode, encode
from pullfill.wire.records import DeathRecord, ProbationRecord

_log = log.get("registry.probations")

SETTLE_S = 0.2
"""How long other frontends, which notice a loss when we do, get to write what they had there."""
TELL_S = 3.0
"""The longest wait for them, if some have not written it by then."""
ASK_S = 1.0
CLEAR_S = 12.0
"""How long a probation waits for other frontends. Longer than a turn of a short prompt."""
LOOK_S = 0.02
"""How often a frontend checks whether its requests at a worker with a probation have outputs."""
SOON_S = 0.05
"""Changes of one death record within this time are written together."""
DEATH_TTL_S = 60
MAX_DEATHS = 256
"""How many of the deaths that this frontend noticed are remembered."""


class Listener(Protocol):
    """Is told about other frontends. Called on the loop."""

    def on_death_elsewhere(self, process: str, names: set[str], fresh: bool) -> None:
        """Another frontend had requests without an output at a worker that died.

        names: their fingerprints.
        fresh: the other frontend has written this just now."""
        ...

    def on_absolved_elsewhere(self, process: str, names: set[str]) -> None:
        """Another frontend found that these requests did not kill that worker."""
        ...

    def on_probations(self) -> None:
        """A probation began, became ready or ended."""
        ...

    def quiet(self, instance_id: str) -> bool:
        """Whether all our requests at that worker have an output, so that none is a suspect."""
        ...

    def on_refused_elsewhere(self, name: str, left_s: float, deaths: int) -> None:
        """Requests with this fingerprint are refused from now on. Any frontend may decide that."""
        ...

    def forget(self, name: str) -> None:
        """Requests with this fingerprint are not refused any more."""
        ...


@dataclass(frozen=True, slots=True)
class Told:
    """What the other frontends had at a worker that was lost. By default nothing.

    tried: number of suspects.
    others: number of other requests without an output.
    complete: whether all frontends have answered, or none can (etcd is away)."""

    tried: int = 0
    others: int = 0
    complete: bool = True


@dataclass(slots=True, eq=False)
class Probation:
    """A probation of this frontend.

    ready: the suspect may be sent to this worker now.
    sure: all other frontends have answered that they have no request without an output there.
    late: not all have answered within CLEAR_S."""

    fingerprint: str
    instance_id: str
    ready: bool = False
    sure: bool = False
    late: bool = False
    lease: int = 0
    heard: asyncio.Event = field(default_factory=asyncio.Event)


class Probations:
    """See the module.

    frontend: our instance id.
    frontends: returns the number of frontends, this one included."""

    def __init__(
        self, client: EtcdClient, namespace: str, frontend: str, frontends: Callable[[], int]
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._frontend = frontend
        self._frontends = frontends
        self._prefix = keys.probations_prefix(namespace)
        self._background = Background(client)
        self._own: dict[str, tuple[str, dict[str, bool]]] = {}
        self._mine: dict[str, Probation] = {}
        self._of: dict[str, ProbationRecord] = {}
        self._at: dict[str, ProbationRecord] = {}
        self._said: dict[tuple[str, str], set[str]] = {}
        self._clear: dict[str, dict[str, int]] = {}
        self._dirty: dict[str, None] = {}
        self._written = asyncio.Event()
        self._written.set()
        self._fresh = False
        self._closed = False
        self._listener: Listener

    def start(self, listener: Listener) -> None:
        """Begin to watch."""
        self._listener = listener
        self._background.run(self._follow(), "probations")

    async def close(self) -> None:
        """End the watch, and all probations of ours. Idempotent."""
        self._closed = True
        leases = [trial.lease for trial in self._mine.values() if trial.lease]
        self._mine.clear()
        await self._background.close()
        with contextlib.suppress(PullfillError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                for lease in leases:
                    await self._client.revoke_lease(lease)

    @property
    def shared(self) -> bool:
        """Whether there are other frontends."""
        return self._frontends() > 1

    # ---------------------------------------------------------------- deaths

    def testify(self, process: str, instance_id: str, names: dict[str, bool]) -> None:
        """Tell other frontends which requests without an output we had at a worker that died.

        Returns at once. names: by fingerprint, whether the request was a suspect before."""
        self._own[instance_id] = process, dict(names)
        while len(self._own) > MAX_DEATHS:
            del self._own[next(iter(self._own))]
        self._write(instance_id)

    def absolve(self, fingerprint: str) -> None:
        """Tell other frontends that this request did not kill the workers named with it.

        Returns at once."""
        for instance_id, (_, names) in self._own.items():
            if names.pop(fingerprint, None) is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(SOON_S, self._write, instance_id)

    def retract(self, instance_id: str) -> None:
        """Take back `testify`: this worker had not died. Returns at once."""
        if instance_id in self._own:
            self._own[instance_id][1].clear()
            self._write(instance_id)

    async def testimony(self, instance_id: str, fingerprint: str) -> Told:
        """Return what all other frontends had at a worker that was lost.

        Waits SETTLE_S at least. Waits TELL_S at most for others to write it, and for etcd.

        fingerprint: requests with this fingerprint are left out."""
        own = keys.death(self._namespace, instance_id, self._frontend).encode()
        prefix = keys.deaths_prefix(self._namespace, instance_id)
        end = (loop := asyncio.get_running_loop()).time() + TELL_S
        while True:
            await asyncio.sleep(SETTLE_S)
            tried, others, said = set[str](), set[str](), 0
            try:
                async with asyncio.timeout(ASK_S):
                    found, _ = await self._client.get_prefix(prefix)
            except (PullfillError, TimeoutError):
                if loop.time() < end:
                    continue  # one late answer does not mean that etcd is away
                return Told()  # we know our own requests only
            for kv in found:
                if kv.key != own:
                    with contextlib.suppress(BadMessage):
                        record = decode(kv.value, DeathRecord)
                        tried.update(record.suspects)
                        others.update(record.others)
                        said += 1
            complete = said >= self._frontends() - 1
            if complete or loop.time() > end:
                names = {fingerprint}
                return Told(len(tried - names), len(others - names), complete)

    # ---------------------------------------------------------------- probations

    def elsewhere(self, fingerprint: str) -> bool:
        """Whether another frontend has a request with this fingerprint on probation."""
        record = self._of.get(fingerprint)
        return record is not None and record.frontend != self._frontend

    def taken(self, instance_id: str) -> bool:
        """Whether a worker has a probation, of ours or of another frontend."""
        record = self._at.get(instance_id)
        if record is not None and record.frontend != self._frontend:
            return True
        return any(trial.instance_id == instance_id for trial in self._mine.values())

    @property
    def any(self) -> bool:
        """Whether there is any probation."""
        return bool(self._at or self._mine)

    def mine(self, fingerprint: str) -> Probation | None:
        """Our probation of this fingerprint, or None."""
        return self._mine.get(fingerprint)

    def take(self, fingerprint: str, instance_id: str, ttl_s: float) -> None:
        """Ask for a probation. Returns at once. `mine` returns it until it is refused or released.

        ttl_s: the probation ends after this time in any case."""
        trial = self._mine[fingerprint] = Probation(fingerprint, instance_id)
        self._background.run(self._take(trial, int(ttl_s) + 1), f"probation-{fingerprint}")

    def release(self, fingerprint: str) -> None:
        """End our probation of this fingerprint, if there is one. Returns at once."""
        trial = self._mine.pop(fingerprint, None)
        if trial is not None and trial.lease:
            self._background.run(self._revoke(trial.lease), f"release-{fingerprint}")

    # ---------------------------------------------------------------- inside

    async def _take(self, trial: Probation, ttl_s: int) -> None:
        name, instance_id = trial.fingerprint, trial.instance_id
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await self._written.wait()  # other frontends must read the death record first
            lease, _, _ = await self._client.grant_lease(ttl_s)
            value = encode(ProbationRecord(frontend=self._frontend, lease=lease))
            both = [
                (keys.probation_of(self._namespace, name), value),
                (keys.probation_at(self._namespace, instance_id), value),
            ]
            trial.lease = lease
            # Its refusal may not have reached us yet, but the end of the probation that led to it.
            refusal = keys.suspect(self._namespace, name)
            if not await self._client.put_all(both, lease, absent=True, unless=[refusal]):
                if self._mine.get(name) is trial:
                    del self._mine[name]
                await self._revoke(lease)
                return
            if self._mine.get(name) is not trial:  # released meanwhile
                await self._revoke(lease)
                return
            try:
                async with asyncio.timeout(CLEAR_S):
                    self._hear(instance_id)
                    await trial.heard.wait()
                    trial.sure = True
            except TimeoutError:
                trial.late = True
        except PullfillError as exc:
            _log.debug("could not announce a probation of %s: %s", name, exc)
        trial.ready = True
        self._listener.on_probations()

    async def _revoke(self, lease: int) -> None:
        with contextlib.suppress(PullfillError):
            await self._client.revoke_lease(lease)

    def _hear(self, instance_id: str) -> None:
        """Set `heard` if all other frontends have answered our probation at this worker."""
        for trial in self._mine.values():
            if trial.instance_id == instance_id and trial.lease:
                said = self._clear.get(instance_id, {})
                if list(said.values()).count(trial.lease) >= self._frontends() - 1:
                    trial.heard.set()

    def _write(self, instance_id: str) -> None:
        self._dirty[instance_id] = None
        if self._written.is_set() and not self._closed:
            self._written.clear()
            self._background.run(self._write_all(), "deaths")

    async def _write_all(self) -> None:
        try:
            while self._dirty:
                instance_id = next(iter(self._dirty))
                del self._dirty[instance_id]
                if instance_id not in self._own:
                    continue
                process, names = self._own[instance_id]
                key = keys.death(self._namespace, instance_id, self._frontend)
                record = DeathRecord(
                    process=process,
                    suspects=[name for name, before in names.items() if before],
                    others=[name for name, before in names.items() if not before],
                )
                await self._background.put(key, encode(record), DEATH_TTL_S)
        finally:
            self._written.set()

    async def _follow(self) -> None:
        async for event in watch_prefix(self._client, self._prefix):
            if isinstance(event, Synced):
                self._fresh = True
                continue
            kind, _, rest = (
                event.key.decode(errors="replace").removeprefix(self._prefix).partition("/")
            )
            try:
                self._on_event(kind, rest.split("/"), event)
            except (BadMessage, ValueError) as exc:
                _log.warning("ignoring %s: %s", event.key.decode(errors="replace"), exc)

    def _on_event(self, kind: str, names: list[str], event: Put | Delete) -> None:
        """Handle one change in etcd. Raises BadMessage or ValueError if it cannot be read."""
        put = isinstance(event, Put)
        if kind == "deaths":
            instance_id, frontend = names
            record = decode(event.value, DeathRecord) if put else None
            self._on_death(instance_id, frontend, record)
            return
        if kind == "clear":
            instance_id, frontend = names
            if put:
                self._clear.setdefault(instance_id, {})[frontend] = int(event.value)
                self._hear(instance_id)
            else:
                said = self._clear.get(instance_id, {})
                said.pop(frontend, None)
                if not said:
                    self._clear.pop(instance_id, None)
            return
        if kind not in ("of", "at"):
            raise BadMessage(f"unknown kind {kind!r}")
        (name,) = names
        table = self._of if kind == "of" else self._at
        if put:
            table[name] = trial = decode(event.value, ProbationRecord)
            if kind == "at" and trial.frontend != self._frontend:
                self._background.run(self._answer(name, trial), f"clear-{name}")
        else:
            table.pop(name, None)
        self._listener.on_probations()

    def _on_death(self, instance_id: str, frontend: str, record: DeathRecord | None) -> None:
        if frontend == self._frontend:
            return
        if record is None:
            self._said.pop((instance_id, frontend), None)  # its lease has run out, as a rule
            return
        names = {*record.suspects, *record.others}
        before = self._said.get((instance_id, frontend), set())
        self._said[instance_id, frontend] = names
        if new := names - before:
            self._listener.on_death_elsewhere(record.process, new, self._fresh)
        if gone := before - names:
            self._listener.on_absolved_elsewhere(record.process, gone)

    async def _answer(self, instance_id: str, record: ProbationRecord) -> None:
        """Write `clear` once our requests there have outputs, after our record of its death."""
        while not (self._written.is_set() and self._listener.quiet(instance_id)):
            await asyncio.sleep(LOOK_S)
            if self._at.get(instance_id) != record:
                return
        key = keys.probation_clear(self._namespace, instance_id, self._frontend)
        with contextlib.suppress(PullfillError):  # its lease may have gone meanwhile
            await self._client.put(key, str(record.lease).encode(), record.lease)
