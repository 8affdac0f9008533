"""The load generator: a process of its own that sends a window's asks and times what comes back.

It shares the cores with the system it measures, so it does little while the window runs: each read
from a socket is kept as bytes with its time, and looked at when the window is over (only a chat
needs its answers at once). One connection per request, on one asyncio loop.

A failure is an answer with `error`. Its own CPU and how late it was are part of the result.

As a process: `python -m benchmarks.serving.load PLAN RESULT`. It says "ready", starts when it reads
a line, says "done" when all is answered, and then writes RESULT.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.serving.contract import Answer, Ask, Kind
from benchmarks.serving.workloads import Workload

PROBE_S = 0.02
"""How often the loop is asked how late it is."""
END = b"\r\n0\r\n\r\n"


Timed = tuple[float, bytes]


@dataclass(slots=True)
class Heard:
    """Of one answer. token_s: in the clock of the reads. error: "" if it is whole."""

    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    request_id: str = ""
    error: str = ""


def heard(reads: Sequence[Timed], expected: int) -> Heard:
    """Take an answer apart; one that has not `expected` tokens is not whole."""
    head, reads = _split_head(reads)
    if not head:
        return Heard(error="no answer: the connection was closed")
    status, chunked = head.split(b"\r\n", 1)[0], b"transfer-encoding: chunked" in head.lower()
    pieces = list(_dechunked(reads) if chunked else reads)
    if b" 200" not in status[:13]:
        text = b"".join(data for _, data in pieces)[:300].decode(errors="replace")
        return Heard(error=f"{status.decode(errors='replace')}: {text}")
    came, usage, ended = Heard(), 0, False
    for when, event in _events(pieces):
        if event == b"[DONE]":
            ended = True
            break
        try:
            value = json.loads(event)
        except ValueError:
            came.error = f"not JSON: {event[:100]!r}"
            return came
        if "error" in value:
            came.error = str(value["error"])[:300]
            return came
        usage = max(usage, _take(came, when, value))
    _judge(came, usage, expected, ended)
    return came


def _take(came: Heard, when: float, event: dict[str, Any]) -> int:
    """Returns the tokens that the event's usage counts, 0 without one."""
    came.request_id = event.get("id") or came.request_id
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids")
        if ids is not None:
            came.tokens += ids
            came.token_s += [when] * len(ids)
        elif choice.get("text") is not None:
            came.token_s.append(when)
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    came.cached = details.get("cached_tokens", came.cached)
    return int(usage.get("completion_tokens") or 0)


def _judge(came: Heard, usage: int, expected: int, ended: bool) -> None:
    if not came.tokens and came.token_s and usage:
        # Without ids an event is one token, but the usage knows better: the last one had the rest.
        missing = usage - len(came.token_s)
        came.token_s = came.token_s[:usage] + [came.token_s[-1]] * missing
    if not ended:
        came.error = f"the stream broke off after {len(came.token_s)} tokens"
    elif len(came.token_s) != expected:
        came.error = f"{len(came.token_s)} tokens instead of {expected}"


def _split_head(reads: Sequence[Timed]) -> tuple[bytes, list[Timed]]:
    """(headers, what follows them); no headers if they never ended."""
    seen = b""
    for index, (when, data) in enumerate(reads):
        seen += data
        head, end, rest = seen.partition(b"\r\n\r\n")
        if end:
            return head, [(when, rest), *reads[index + 1 :]]
    return b"", []


def _dechunked(reads: Sequence[Timed]) -> Iterator[Timed]:
    """The payload of HTTP chunks, each piece with the time of the read it came in."""
    buffer, left, skip = b"", 0, 0
    for when, data in reads:
        buffer += data
        while buffer:
            if skip or left:
                cut = min(skip or left, len(buffer))
                piece, buffer = buffer[:cut], buffer[cut:]
                if skip:
                    skip -= cut
                    continue
                left -= cut
                skip = 2 if not left else 0
                yield when, piece
                continue
            line, end, rest = buffer.partition(b"\r\n")
            if not end:
                break
            buffer = rest
            try:
                left = int(line.split(b";")[0], 16)
            except ValueError:
                return
            if not left:
                return


def _events(pieces: Sequence[Timed]) -> Iterator[Timed]:
    """`data:` of each server-sent event, with the time of the piece that completed it."""
    buffer = b""
    for when, data in pieces:
        buffer += data.replace(b"\r\n", b"\n")
        while True:
            event, end, rest = buffer.partition(b"\n\n")
            if not end:
                break
            buffer = rest
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield when, b"\n".join(lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """limit_s: a request that is not over by then has failed."""

    url: str
    model: str
    workload: Workload
    limit_s: float = 120.0


@dataclass(slots=True)
class Result:
    """Answers in the order of the asks; those that a closed loop never came to are left out.

    took_s: until the last answer. cpu_s: our own in that time. lag_s: how late a timer was, one
    value for every 20 ms: how late we may have seen a token."""

    answers: list[Answer]
    took_s: float
    cpu_s: float
    lag_s: list[float] = field(default_factory=list)
    dry: bool = False
    """A closed loop ran out of asks before the window was over: the load was not what it says."""


class _Exchange(asyncio.Protocol):
    """One request and the raw answer to it. `done` when it is over, whichever way."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.chunks: list[tuple[float, bytes]] = []
        self._request, self._done, self._tail = request, done, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.monotonic(), data))
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END and self._transport is not None:
            self._transport.close()
            self._over()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over()

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _over(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class Load:
    """Sends one plan. Used once; `run` needs a running loop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lanes: dict[str, list[int]] = {}
        for number, ask in enumerate(plan.workload.asks):
            self._lanes.setdefault(ask.lane, []).append(number)
        self._requests = {
            number: request_of(plan, ask, ask.prompt)
            for number, ask in enumerate(plan.workload.asks)
            if not ask.grows
        }
        self._answers: dict[int, Answer] = {}
        self._raw: dict[int, list[tuple[float, bytes]]] = {}
        self._begin = 0.0
        self._dry = False
        self._lag: list[float] = []

    async def run(self) -> tuple[float, float]:
        """Until everything is answered. Returns seconds and CPU seconds of this process."""
        probe = asyncio.create_task(self._probe())
        cpu = time.process_time()
        self._begin = time.monotonic()
        try:
            await asyncio.gather(*(self._lane(numbers) for numbers in self._lanes.values()))
        finally:
            took, used = self._now(), time.process_time() - cpu
            probe.cancel()
            with suppress(asyncio.CancelledError):
                await probe
        return took, used

    def result(self, took_s: float, cpu_s: float) -> Result:
        """Look at what came. Takes CPU: after the window."""
        for number, chunks in self._raw.items():
            self._fill(self._answers[number], heard(chunks, self._asked(number).max_tokens))
        answers = [self._answers[number] for number in sorted(self._answers)]
        return Result(answers, took_s, cpu_s, self._lag, self._dry)

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _asked(self, number: int) -> Ask:
        return self._plan.workload.asks[number]

    async def _probe(self) -> None:
        while True:
            due = time.monotonic() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._lag.append(max(0.0, time.monotonic() - due))

    async def _lane(self, numbers: Sequence[int]) -> None:
        """Its asks, one after the other. `said`: the conversation so far."""
        said: tuple[int, ...] = ()
        seconds = self._plan.workload.seconds
        for number in numbers:
            ask = self._asked(number)
            free = self._now()
            due = free if ask.at_s is None else ask.at_s
            if seconds is not None and due >= seconds:
                return
            if due > free:
                await asyncio.sleep(due - free)
            answer = self._answers[number] = Answer(ask, self._now(), due)
            if ask.at_s is None:
                answer.due_s = answer.sent_s
            if not ask.grows:
                self._raw[number] = await self._exchange(answer, self._requests[number])
                continue
            prompt = said + ask.prompt
            chunks = await self._exchange(answer, request_of(self._plan, ask, prompt))
            self._fill(answer, heard(chunks, ask.max_tokens))
            if answer.error:
                self._give_up(numbers, number)
                return
            said = prompt + tuple(answer.tokens)
        last = self._asked(numbers[-1])
        self._dry |= last.at_s is None and seconds is not None and self._now() < seconds

    def _give_up(self, numbers: Sequence[int], failed: int) -> None:
        for number in numbers:
            if number > failed:
                error = "not asked: the turn before it failed"
                self._answers[number] = Answer(
                    self._asked(number), self._now(), self._now(), error=error
                )

    async def _exchange(self, answer: Answer, request: bytes) -> list[tuple[float, bytes]]:
        """Send and read to the end. What went wrong on the way is in `answer.error`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        exchange = _Exchange(request, done)
        target = urlsplit(self._plan.url)
        host, port = target.hostname or "", target.port or 80
        try:
            async with asyncio.timeout(self._plan.limit_s):
                await loop.create_connection(lambda: exchange, host, port)
                await done
        except TimeoutError:
            answer.error = f"not over within {self._plan.limit_s:g} s"
            exchange.cut()
        except OSError as exc:
            answer.error = f"cannot connect: {exc}"
        return exchange.chunks

    def _fill(self, answer: Answer, came: Heard) -> None:
        answer.token_s = [when - self._begin for when in came.token_s]
        answer.tokens, answer.cached, answer.request_id = came.tokens, came.cached, came.request_id
        answer.error = answer.error or came.error


def request_of(plan: Plan, ask: Ask, prompt: Sequence[int]) -> bytes:
    """The whole HTTP request. Token ids come back for all but long prompts: there they would bring
    the prompt along, and a few tokens need no telling apart."""
    body = {
        "model": plan.model,
        "prompt": list(prompt),
        "max_tokens": ask.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.kind is not Kind.LONG:
        body["return_token_ids"] = True
    content = json.dumps(body, separators=(",", ":")).encode()
    target = urlsplit(plan.url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def send(plan: Plan) -> Result:
    """All of it in this process (tests, and whoever measures no ITL)."""
    load = Load(plan)
    return load.result(*await load.run())


def main() -> int:
    plan_file, result_file = map(Path, sys.argv[1:3])
    load = Load(msgspec.json.decode(plan_file.read_bytes(), type=Plan))
    gc.collect()
    gc.disable()
    with suppress(PermissionError):
        # As if it ran elsewhere: a token is not seen late because an engine has the core.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    if not sys.stdin.readline():
        return 1
    took, cpu = asyncio.run(load.run())
    print("done", flush=True)
    sys.stdin.readline()
    result_file.write_bytes(msgspec.json.encode(load.result(took, cpu)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
