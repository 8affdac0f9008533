"""Why and how recent requests were served, for `pullfill explain` and GET /pullfill/requests/ID.

Bounded: the oldest record goes first. Used on the event loop only.

Ids: users know the `id` of the OpenAI response. The engine sees one request per prompt of a batch
(`ID-0`, `ID-1`, …; `ID_0` for /v1/responses) and per choice (`0_ID`, `1_ID`, …), plus a random
tail that vLLM adds. Records are kept under the id without the tail; looking up the response id
finds the record of the first prompt and choice.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pullfill.engine import front_wire, request_targets
from pullfill.engine.migration import choice_of
from pullfill.wire import MAX_TEXT, DecodeChoice, ExplainRecord

MAX_RECORDS = 10_000


@dataclass(slots=True)
class Trace:
    """What the frontend itself knows of one engine request.

    key: see `key_of`.
    migrated_from: the decode workers that it has left.
    migrated_tokens: number of tokens that were out when it left the last one.
    decode_choice: how its last decode worker was chosen.
    redirected_from, redirect_reason: the worker that has redirected it, and why.
    arrived_at: when it came, in seconds since 1970.
    answer_ms: from then to the end of its answer. None: it has not ended, or was cancelled.
    answer_tokens: length of its answer.
    targets_ms: what it names for TTFT and ITL. None: nothing.
    serial: number of its record in the order of their coming."""

    key: str
    route_ms: float | None = None
    first_token_ms: float | None = None
    migrated_from: list[str] = field(default_factory=list)
    migrated_tokens: int = 0
    decode_choice: DecodeChoice | None = None
    redirected_from: str | None = None
    redirect_reason: str | None = None
    arrived_at: float = 0.0
    answer_ms: float | None = None
    answer_tokens: int = 0
    targets_ms: tuple[float | None, float | None] = (None, None)
    serial: int = 0

    def ended(self, arrived: float, tokens: int, params: Any) -> None:
        """Note that its answer has ended.

        arrived: `time.monotonic` when it came. params: vLLM's SamplingParams."""
        self.answer_ms = (time.monotonic() - arrived) * 1000.0
        self.answer_tokens = tokens
        self.targets_ms = request_targets.targets(params)


def key_of(request_id: str, external_id: str | None) -> str:
    """`0_cmpl-x-0-1234abcd` with external id `cmpl-x-0` → `0_cmpl-x-0`. MAX_TEXT at most."""
    if not external_id:
        return request_id[:MAX_TEXT]
    choice = choice_of(request_id, external_id)
    return (f"{choice}_{external_id}" if choice else external_id)[:MAX_TEXT]


def refused_id(request_id: str) -> str:
    """Return why a request with this id is refused. Empty: it is not. Clients choose ids."""
    if len(request_id) <= MAX_TEXT:
        return ""
    return f"the request's id has {len(request_id)} characters: give one of at most {MAX_TEXT}"


class ExplainStore:
    """Last `limit` records."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._limit = limit
        self._open: OrderedDict[str, Trace] = OrderedDict()
        self._records: OrderedDict[str, tuple[ExplainRecord, Trace]] = OrderedDict()
        self._serial = 0

    def open(self, wire_id: str, trace: Trace) -> None:
        """Remember what request goes by `wire_id` at a worker, until its record comes."""
        self._open[wire_id] = trace
        if len(self._open) > self._limit:
            self._open.popitem(last=False)

    def take(self, payload: Any) -> None:
        """Keep the records that a worker sent. Raises BadMessage."""
        for record in front_wire.decode_explain(payload):
            self.put(record)

    def put(self, record: ExplainRecord) -> None:
        """Keep a worker's record, with the frontend's own timings. Unknown requests are dropped."""
        trace = self._open.pop(record.request_id, None)
        if trace is None:
            return
        self._records.pop(trace.key, None)
        self._serial += 1
        trace.serial = self._serial
        self._records[trace.key] = record, trace
        if len(self._records) > self._limit:
            self._records.popitem(last=False)

    def since(self, serial: int) -> Iterator[tuple[ExplainRecord, Trace]]:
        """Yield the records that came after the one with this number, newest first."""
        for record, trace in reversed(self._records.values()):
            if trace.serial <= serial:
                return
            yield record, trace

    def get(self, response_id: str) -> ExplainRecord | None:
        """The record of a response id, or of one of its parts (module docstring)."""
        for key in (
            response_id,
            f"{response_id}-0",
            f"0_{response_id}",
            f"0_{response_id}-0",
            f"{response_id}_0",
        ):
            if (found := self._records.get(key)) is not None:
                return _told(response_id, *found)
        return None


def _told(response_id: str, record: ExplainRecord, trace: Trace) -> ExplainRecord:
    """Combine what a worker and this frontend know about one request."""
    timings = msgspec.structs.replace(
        record.timings_ms, route=trace.route_ms, first_token=trace.first_token_ms
    )
    return msgspec.structs.replace(
        record,
        request_id=response_id,
        timings_ms=timings,
        migrated_from=tuple(trace.migrated_from),
        migrated_tokens=trace.migrated_tokens,
        decode_choice=trace.decode_choice,
        redirected_from=trace.redirected_from,
        redirect_reason=trace.redirect_reason,
    )


def to_json(record: ExplainRecord) -> bytes:
    """The JSON of `GET /pullfill/requests/ID` (docs/wire.md)."""
    return msgspec.json.encode(record)
