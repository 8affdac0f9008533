"""What a server streamed, from raw bytes with times: HTTP/1.1, chunks, server-sent events, tokens.

A token's time is that of the read that completed its event. Nothing here raises: what cannot be
understood is an error in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
