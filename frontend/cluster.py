"""What workers report, fetched when somebody asks: their `/status` and `/metrics`.

All workers are asked at once with a one-second limit each, so one that hangs costs a second and a
`lost` in its row, never the page. Metrics are merged as text: parsing every family of every worker
into objects would hold up the token streams of this process for tens of milliseconds per scrape.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp

from pullfill import wire
from pullfill.wire import WorkerRecord, WorkerState

FETCH_TIMEOUT_S = 1.0
MAX_BODY = 8 << 20
ROLES = ("decode", "prefill")

_SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(\{.*\})? [^ ]+( -?\d+)?\Z")
_SUFFIX = re.compile(r"_(total|created|bucket|sum|count|info)\Z")


class ClusterView:
    """One HTTP session to all workers. `close` when done."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def records(self) -> list[WorkerRecord]:
        """Decode workers, then prefill workers, by id."""
        return [
            record for role in ROLES for _, record in sorted(self._directory.workers(role).items())
        ]

    async def status(self) -> dict[str, Any]:
        """The object of `GET /pullfill/status` (design.md §5)."""
        records = self.records()
        reports = await asyncio.gather(*(self._report(record) for record in records))
        queue = wire.QueueStatus()
        for record, report in zip(records, reports, strict=True):
            found = _queue(report) if record.role == "decode" else None
            if found is not None and found.depth_jobs >= queue.depth_jobs:
                queue = found
        return {
            "workers": [_row(r, s) for r, s in zip(records, reports, strict=True)],
            "queue": {name: getattr(queue, name) for name in queue.__struct_fields__},
        }

    async def metrics(self, own: str) -> str:
        """`own` (this process, Prometheus text) and every worker's metrics as one text."""
        records = [record for record in self.records() if record.http]
        texts = await asyncio.gather(*(self._fetch(record.http + "/metrics") for record in records))
        merged = MergedMetrics()
        merged.add({}, own)
        for record, body in zip(records, texts, strict=True):
            if body is not None:
                await asyncio.sleep(0)  # streams go on between the pages of two workers
                labels = {"instance_id": record.instance_id, "role": record.role}
                merged.add(labels, body.decode("utf-8", "replace"))
        return merged.text()

    async def _report(self, record: WorkerRecord) -> dict[str, Any] | None:
        body = await self._fetch(record.http + "/status") if record.http else None
        if body is None:
            return None
        try:
            report = json.loads(body)
        except ValueError:
            return None
        return report if isinstance(report, dict) else None

    async def _fetch(self, url: str) -> bytes | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S), trust_env=False
            )
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    return None
                body = await response.content.read(MAX_BODY)
                while not response.content.at_eof() and len(body) < MAX_BODY:
                    body += await response.content.read(MAX_BODY - len(body))
                return body
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None


def _queue(report: dict[str, Any] | None) -> wire.QueueStatus | None:
    found = (report or {}).get("queue")
    if not isinstance(found, dict):
        return None
    try:
        return wire.QueueStatus(**{k: found[k] for k in wire.QueueStatus.__struct_fields__})
    except KeyError:
        return None


def _row(record: WorkerRecord, report: dict[str, Any] | None) -> dict[str, Any]:
    load = (report or {}).get("load")
    return {
        "instance_id": record.instance_id,
        "role": record.role,
        "state": str(WorkerState.LOST if report is None else record.state),
        "model": record.model,
        "host": record.host,
        "pid": record.pid,
        "http": record.http,
        "restarts": record.restarts,
        "load": load if isinstance(load, dict) else {},
    }


# ------------------------------------------------------------------------------- metrics as text


def merge_metrics(parts: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """`MergedMetrics` of (labels, text) parts at once."""
    merged = MergedMetrics()
    for labels, text in parts:
        merged.add(labels, text)
    return merged.text()


class MergedMetrics:
    """One Prometheus text from several: each family once."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def add(self, labels: Mapping[str, str], text: str) -> None:
        """A text in the 0.0.4 format; `labels` are added to its samples. Lines that are neither
        header nor sample are dropped, so one broken worker cannot spoil the page."""
        extra = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        current: _Family | None = None
        for line in text.splitlines():
            if line.startswith("# "):
                current = _header(self._families, line) or current
            elif _SAMPLE.match(line):
                name = re.split(r"[ {]", line, maxsplit=1)[0]
                if current is None or not current.has(name):
                    current = self._families.setdefault(name, _Family(name))
                current.samples.append(_labelled(line, name, extra) if extra else line)

    def text(self) -> str:
        return "".join(family.text() for family in self._families.values() if family.samples)


class _Family:
    """Header lines and samples of one metric name."""

    __slots__ = ("help", "name", "samples", "type")

    def __init__(self, name: str) -> None:
        self.name = name
        self.help = ""
        self.type = ""
        self.samples: list[str] = []

    def has(self, sample: str) -> bool:
        return sample == self.name or _SUFFIX.sub("", sample) == _SUFFIX.sub("", self.name)

    def text(self) -> str:
        header = [line for line in (self.help, self.type) if line]
        return "\n".join([*header, *self.samples]) + "\n"


def _header(families: dict[str, _Family], line: str) -> _Family | None:
    words = line.split(" ", 3)
    if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
        return None
    family = families.setdefault(words[2], _Family(words[2]))
    if words[1] == "HELP":
        family.help = family.help or line
    else:
        family.type = family.type or line
    return family


def _labelled(line: str, name: str, extra: str) -> str:
    rest = line[len(name) :]
    if not rest.startswith("{"):
        return f"{name}{{{extra}}}{rest}"
    if 'instance_id="' in rest:
        return line
    comma = "" if rest.startswith("{}") else ","
    return f"{name}{{{extra}{comma}{rest[1:]}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def reasons_of(records: Sequence[WorkerRecord]) -> list[str]:
    """For /ready: listed workers that take no new work."""
    return [
        f"{record.instance_id} is {record.state}"
        for record in records
        if record.state is not WorkerState.READY
    ]
