"""Fetches `/status` and `/metrics` of all workers, and merges them. Asks other frontends.

All workers are asked at once, for `fetch_s` at most. A worker that hangs is shown as `lost`.
Metrics are merged as text. To parse them into objects would stop the token streams of this process
for tens of milliseconds per scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from urllib.parse import quote

import aiohttp

from pullfill.clock import SYSTEM_CLOCK
from pullfill.net import http_proof
from pullfill.net.this_host import open_files
from pullfill.registry.directory import Directory
from pullfill.runtime.health import ServerHealth
from pullfill.runtime.lifecycle import end
from pullfill.snapshot import Cluster, Explained, Report, Reports, cluster_of, read_report
from pullfill.wire import WorkerRecord

MAX_BODY = 8 << 20
ROLES = ("decode", "prefill")
# The route where frontends ask each other for the record of a request.
REQUESTS = "/pullfill/requests/"
# Header of a question from another frontend, with its instance id. It is not passed on.
ASKED_BY = "x-pullfill-asked-by"
# Label of every series: one Prometheus may scrape several clusters.
NAMESPACE = "pullfill_namespace"

_HEADER = re.compile(r"# (HELP|TYPE) (\S+) ")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?( [^ ]+(?: -?[\d.]+)?)\Z")


@dataclass(slots=True, eq=False)
class ClusterView:
    """Fetches the reports of all workers, over one HTTP session. `close` it at the end.

    etcd: the health of etcd, as this process sees it.
    namespace: the cluster's.
    own_id: the instance id of this frontend. Empty: this process is none.
    fetch_s: how long a worker has to answer. ready_s: how much of it /ready waits for.
    again_s: /ready asks again after so long, and uses an answer for fresh_s.
    most_asked: workers that /ready asks in a second, at most. Reading their answers holds up token
    streams."""

    directory: Directory
    etcd: ServerHealth
    namespace: str
    own_id: str = ""
    _: KW_ONLY
    fetch_s: float = 1.0
    ready_s: float = 0.5
    again_s: float = 0.3
    fresh_s: float = 1.5
    most_asked: float = 256.0
    _session: aiohttp.ClientSession | None = None
    # By whether open jobs are asked for.
    _looking: dict[bool, asyncio.Task[dict[str, Report | None]]] = field(default_factory=dict)
    # The last report of each worker that was asked. None: it has never answered.
    _last: dict[str, Report | None] = field(default_factory=dict)
    _asked_at: float = -math.inf

    async def close(self) -> None:
        await end(*self._looking.values())
        if self._session is not None:
            await self._session.close()

    def records(self) -> list[WorkerRecord]:
        """Decode workers, then prefill workers, by id."""
        return [
            record for role in ROLES for _, record in sorted(self.directory.workers(role).items())
        ]

    async def status(self) -> Cluster:
        """Return the cluster as it is now."""
        return self.cluster(await self.reports())

    def cluster(self, reports: Reports, tokens_per_s: Mapping[str, float] | None = None) -> Cluster:
        """Return the cluster of these reports (`cluster_of`)."""
        return cluster_of(reports, self.etcd.status(), self.directory.age_s, tokens_per_s)

    async def reports(self, *, jobs: bool = False) -> list[tuple[WorkerRecord, Report | None]]:
        """Return the record and the report of every worker. None: it does not answer.

        jobs: with the open jobs (`Report.jobs`, `held`). Not at a frontend: with `ended`, too."""
        reports = await self._look(jobs)
        # A worker that joined after the others were asked is left out: it is not lost.
        return [(r, reports[r.instance_id]) for r in self.records() if r.instance_id in reports]

    async def reasons(self) -> list[str]:
        """Return which servers and workers are away or cut off, for /ready.

        A worker that hangs delays this by `ready_s` at most. Its last report is used for `fresh_s`.
        Of more workers than are asked in `again_s`, reports are used for longer."""
        pause_s = max(self.again_s, len(self.records()) / self.most_asked)
        if SYSTEM_CLOCK.monotonic() - self._asked_at > pause_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.ready_s):
                    await asyncio.shield(self._look())
        old_s = self.fresh_s + pause_s - self.again_s
        # Who has joined since is left out: it is not lost.
        told = [
            (r, self._last[r.instance_id]) for r in self.records() if r.instance_id in self._last
        ]
        fresh = [(r, s if s is not None and s.age_s < old_s else None) for r, s in told]
        return cluster_of(fresh, self.etcd.status()).reasons()

    async def metrics(self, own: Awaitable[str]) -> str:
        """`own` (the page of this process) and every worker's metrics as one text.

        All are awaited at once, so workers that hang delay the text only once."""
        # One process may have two records, one for each role.
        records = list({r.http: r for r in reversed(self.records()) if r.http}.values())[::-1]
        pages = (self._fetch(f"{record.http}/metrics") for record in records)
        page, texts = await asyncio.gather(own, asyncio.gather(*pages))
        merged = MergedMetrics()
        cluster = {NAMESPACE: self.namespace}
        merged.add(cluster, page)
        for record, body in zip(records, texts, strict=True):
            if body is not None:
                await asyncio.sleep(0)  # streams go on between the pages of two workers
                labels = {"instance_id": record.instance_id, "role": record.role}
                merged.add(cluster | labels, body.decode("utf-8", "replace"))
        return merged.text()

    async def record_elsewhere(self, request_id: str, authorization: str = "") -> bytes | None:
        """Return what another frontend tells of a request, as JSON. None: none knows it.

        authorization: the client's header. The others get a proof of its key, never the key."""
        headers = {ASKED_BY: self.own_id}
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer" and (key := key.strip()):
            proof = http_proof.proof(key.encode("latin-1"), REQUESTS + request_id, time.time())
            headers[http_proof.HEADER] = proof
        path = REQUESTS + quote(request_id, safe="")
        others = self.directory.workers("frontend").items()
        asked = [
            asyncio.create_task(self._fetch(record.http + path, headers))
            for instance_id, record in others
            if record.http and instance_id != self.own_id
        ]
        try:
            for answer in asyncio.as_completed(asked):
                if (body := await answer) is not None:
                    return body
        finally:
            for task in asked:
                task.cancel()
        return None

    async def record_kept(self, request_id: str) -> Explained | None:
        """Return what decode workers know of a request that no frontend has sent: the newest."""
        query = f"?request={quote(request_id, safe='')}"
        asked = [self._report(r, query) for r in self.records() if r.role == "decode"]
        found = [told.request for told in await asyncio.gather(*asked) if told and told.request]
        return max(found, key=attrgetter("arrived_at"), default=None)

    def _look(self, jobs: bool = False) -> asyncio.Task[dict[str, Report | None]]:
        """Return a task that fetches all reports. Calls during a fetch share it."""
        for kind in (True, jobs):
            if (task := self._looking.get(kind)) is not None and not task.done():
                return task
        self._looking[jobs] = task = asyncio.create_task(self._ask_all(jobs))
        return task

    async def _ask_all(self, jobs: bool) -> dict[str, Report | None]:
        self._asked_at = SYSTEM_CLOCK.monotonic()
        records = {record.instance_id: record for record in self.records()}
        self._last = {i: last for i, last in self._last.items() if i in records}
        # Frontends have the requests that they have sent, and show no others.
        query = "" if not jobs else "?jobs" if self.own_id else "?jobs&ended"
        found = await asyncio.gather(*(self._report(r, query) for r in records.values()))
        return dict(zip(records, found, strict=True))

    async def _report(self, record: WorkerRecord, query: str) -> Report | None:
        body = await self._fetch(f"{record.http}/status{query}") if record.http else None
        report = read_report(body or b"")
        self._last[record.instance_id] = report or self._last.get(record.instance_id)
        return report

    async def _fetch(self, url: str, headers: Mapping[str, str] | None = None) -> bytes | None:
        if self._session is None:
            # With few connections, workers that hang would make others wait and time out.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=max(100, open_files() // 4)),
                timeout=aiohttp.ClientTimeout(total=self.fetch_s),
                trust_env=False,
            )
        try:
            async with self._session.get(url, headers=headers) as response:
                if response.status != 200:
                    return None
                body = await response.content.read(MAX_BODY)
                while not response.content.at_eof() and len(body) < MAX_BODY:
                    body += await response.content.read(MAX_BODY - len(body))
                return body
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None


class MergedMetrics:
    """One Prometheus text from several: each family once."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def add(self, labels: Mapping[str, str], text: str) -> None:
        """A text in one format; `labels` are added to its samples. Lines that are neither header
        nor sample are dropped, so one broken worker cannot spoil the page."""
        extra = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        current = _Family("")
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self._family(header[2])
                current.header.setdefault(header[1], line)
            elif sample := _SAMPLE.match(line):
                name, own, value = sample.groups()
                # A histogram has its samples below the header of its name without a suffix.
                if not current.name or not name.startswith(current.name):
                    current = self._family(name)
                told = "" if own and 'instance_id="' in own else extra
                both = ",".join(filter(None, (told, own)))
                current.samples.append(f"{name}{{{both}}}{value}" if both else line)

    def _family(self, name: str) -> _Family:
        return self._families.setdefault(name, _Family(name))

    def text(self) -> str:
        return "".join(
            "\n".join([*family.header.values(), *family.samples, ""])
            for family in self._families.values()
            if family.samples
        )


@dataclass(slots=True)
class _Family:
    """Header lines, by their kind, and samples of one metric name."""

    name: str
    header: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
