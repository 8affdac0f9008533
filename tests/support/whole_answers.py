"""Whole answers of any API, streamed or not, to compare one server's with another's."""

from __future__ import annotations

import json
from typing import Any

import httpx

_GROWS = frozenset({
    "arguments", "content", "delta", "partial_json", "reasoning", "text", "thinking",
})  # fmt: skip
"""Texts of which each event of a stream brings a piece."""
_OWN = frozenset({
    "cache_creation_input_tokens", "cache_read_input_tokens", "call_id", "created", "created_at",
    "id", "input_tokens_details", "item_id", "kv_transfer_params", "obfuscation",
    "previous_response_id", "prompt_tokens_details", "sequence_number", "signature",
    "system_fingerprint",
})  # fmt: skip
"""What two servers never say alike: names, times, and what was cached."""
_NEAR = 1e-3
"""Log probabilities are this near to each other."""


def whole(answer: httpx.Response) -> tuple[str, dict[str, Any]]:
    """Return the id of an answer, and all that it says. Of a stream: its events merged."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        said: dict[str, Any] = answer.json()
        return said["id"], said
    events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    merged: dict[str, Any] = {}
    for event in events:
        _merge(merged, {event["type"]: event} if "type" in event else event)
    first = events[0]
    return first.get("id") or (first.get("response") or first.get("message"))["id"], merged


def _merge(into: dict[str, Any], event: dict[str, Any]) -> None:
    for key, value in event.items():
        old = into.get(key)
        if value is None:
            into.setdefault(key, None)
        elif isinstance(value, dict):
            into[key] = old or {}
            _merge(into[key], value)
        elif isinstance(value, list) and all(isinstance(x, dict) and "index" in x for x in value):
            rows = into[key] = old or []
            for row in value:
                found = [r for r in rows if r["index"] == row["index"]]
                if not found:
                    rows += (found := [{"index": row["index"]}])
                _merge(found[0], row)
            rows.sort(key=lambda row: row["index"])
        elif isinstance(value, list) or (isinstance(value, str) and key in _GROWS):
            into[key] = value if old is None else old + value
        else:
            into[key] = value


def differs(ours: Any, theirs: Any, at: str = "answer") -> str:
    """Return where and how two answers differ. Empty: they say the same."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = (ours.keys() | theirs.keys()) - _OWN
        pairs = [(f"{at}.{key}", ours.get(key), theirs.get(key)) for key in sorted(keys)]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{at}[{i}]", *both) for i, both in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, float) and isinstance(theirs, float):
        return "" if abs(ours - theirs) < _NEAR else f"{at}: {ours} is not {theirs}"
    else:
        return "" if ours == theirs else f"{at}: {ours!r} is not {theirs!r}"
    return next((why for name, one, other in pairs if (why := differs(one, other, name))), "")
