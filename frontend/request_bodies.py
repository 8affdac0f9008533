"""Refuses JSON bodies that vLLM's checks would take seconds for.

vLLM reads and checks a body on the event loop. Meanwhile all streams wait, and after six seconds
their workers take the frontend for dead. Valid values cost little. For each wrong one pydantic
collects several errors. A body of 256 KiB, `"messages": [1, 1, …]`, takes seconds and gigabytes.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MOST_COMMAS = 1 << 23
"""Reading so many values takes about a second."""
MOST_VALUES = 1 << 15
"""Elements of lists and members of objects, except for those in `_PLAIN`."""
_PLAIN = frozenset({
    "prompt", "tokens", "token_ids", "prompt_token_ids", "stop_token_ids", "allowed_token_ids",
    "logit_bias",
})  # fmt: skip
"""Members that may hold many numbers or prompts, of which vLLM checks each in a moment."""
_TEXTS = frozenset({"stop", "bad_words"})
"""Members that may hold many texts. Too many get 400 and the reason later (request_limits.py)."""
_REPORTS = "derender"
_MOST_REPORTED = 1 << 20
"""The same for bodies that hold an answer with its log probabilities. Each has only one type."""


def why_too_much(path: str, body: bytes) -> str:
    """Return why the JSON body is refused, for the user. Empty: it is not.

    path: the route. A body that is no JSON passes: vLLM refuses it at once."""
    commas = body.count(b",")
    if commas > MOST_COMMAS:
        return f"a request may hold at most {MOST_COMMAS} commas: send it in parts"
    most = _MOST_REPORTED if path.endswith(_REPORTS) else MOST_VALUES
    if commas + body.count(b"{") + body.count(b"[") <= most:
        return ""  # each value has a comma before it, or is the first in its list or object
    if _values(_read(body), most) <= most:
        return ""
    return (
        f"the request holds more than {most} values, not counting tokens and prompts: send it in "
        "parts"
    )


def _read(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(body)  # reads more than JSON, such as NaN, and so does vLLM
    except (ValueError, RecursionError):
        return None


def _values(read: Any, most: int) -> int:
    """Count elements and members, in depth. Stops soon after `most`."""
    count, todo = 0, [read]
    while todo and count <= most:
        one = todo.pop()
        if isinstance(one, dict):
            count += len(one)
            todo += [value for key, value in one.items() if not _costs_little(key, value)]
        elif isinstance(one, list):
            count += len(one)
            if not set(map(type, one)) <= {int, float, str}:
                todo += one
    return count


def _costs_little(key: str, value: Any) -> bool:
    """Whether vLLM checks this member in a moment, however much it holds."""
    if key in _TEXTS:
        return isinstance(value, list) and set(map(type, value)) <= {str}
    return key in _PLAIN and _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether it holds only numbers, only texts, or only lists of numbers."""
    if isinstance(value, dict):
        return set(map(type, value.values())) <= {int, float}
    if not isinstance(value, list):
        return True
    kinds = set(map(type, value))
    if kinds == {list}:
        return all(set(map(type, one)) <= {int} for one in value)
    return kinds <= {int} or kinds <= {str}
