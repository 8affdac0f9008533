"""What a client may ask for: limits that vLLM does not check, and latency targets.

The frontend calls `why_refused` and `why_too_many`. The comment at each limit says what vLLM would
do with a request beyond it: fail, or block an engine for seconds.
`tests/integration/test_odd_requests.py` sends one.

A client names targets for its first token (TTFT) and between two tokens (ITL) in `vllm_xargs`, or
in headers, which the frontend copies into `vllm_xargs`. These travel to the decode worker. Of
requests that name none, `router.ttft_ms` and `router.itl_ms` are the targets. No vLLM import here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pullfill.wire import PrefixHolder

# Characters of a schema, grammar, regex, or of all choices together. To compile more takes seconds
# on the engine's core, and the time grows faster than the size.
MAX_STRUCTURED = 128 << 10
# Choices of a structured output. 20,000 took more than a minute to compile.
MAX_CHOICES = 2000
# Stop strings of a request. The frontend looks for each of them after each token.
MAX_STOPS = 256
# Key of the hint in the `kv_transfer_params` of vLLM's Request.
PREFIX_HOLDER = "prefix_holder"
_TRANSFER_KEYS = ("kv_transfer_params", "ec_transfer_params")

# The key in `vllm_xargs` of each header.
TARGET_HEADERS = {b"x-pullfill-ttft-ms": "ttft_ms", b"x-pullfill-itl-ms": "itl_ms"}
MAX_MS = 3.6e6


@dataclass(slots=True)
class _Asked:
    """What an HTTP request asks for.

    targets: values of its headers, by their keys in `vllm_xargs`.
    choices: how many answers (`n`) it has asked for, and not submitted to the engine yet."""

    targets: dict[str, str]
    choices: int = 0


# Of the HTTP request that is being served.
_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)


def begin(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Begin to serve an HTTP request, in its context."""
    _asked.set(
        _Asked({TARGET_HEADERS[k]: v.decode("latin-1") for k, v in headers if k in TARGET_HEADERS})
    )


def why_too_many(choices: int, most: int) -> str:
    """Count choices that are asked for. Return why there are too many, for the user. Empty: there
    are not.

    vLLM submits all choices of all prompts of an HTTP request in one turn of the event loop."""
    if (asked := _asked.get()) is None:
        return ""
    asked.choices += choices
    return "" if asked.choices <= most else (
        f"the request asks for more than {most} answers (prompts, items or chats, times n): "
        "send it in parts, or ask the operator to set VLLM_MAX_COMPLETION_PROMPTS for this frontend"
    )  # fmt: skip


def submitted() -> None:
    """Forget what was counted: the HTTP request is submitting it."""
    if (asked := _asked.get()) is not None:
        asked.choices = 0


def why_refused(params: Any) -> str:
    """Return why the request is refused, for the user. Empty: it is not.

    params: vLLM's SamplingParams or PoolingParams."""
    extra = getattr(params, "extra_args", None) or {}
    for key in _TRANSFER_KEYS:
        # vLLM reads entries of it before we can drop it: AttributeError in the frontend.
        if extra.get(key) is not None and not isinstance(extra[key], dict):
            return f"vllm_xargs.{key} must be an object, and is ignored if it is: leave it out"
    if why := why_bad_targets(extra):
        return why
    if len(getattr(params, "stop", None) or ()) > MAX_STOPS:
        return f"stop has {len(params.stop)} strings, at most {MAX_STOPS} are taken"
    structured = getattr(params, "structured_outputs", None)
    return "" if structured is None else _too_large(structured)


def strip_transfer_params(request: Any, holder: PrefixHolder | None = None) -> None:
    """Drop what a client says about KV transfer. The client's own dict is not changed.

    The frontend does this, and each decode worker again.

    holder: the frontend's hint, which takes that place. Generating requests only."""
    params = request.sampling_params
    extra = getattr(params, "extra_args", None)
    if extra and any(key in extra for key in _TRANSFER_KEYS):
        params.extra_args = {k: v for k, v in extra.items() if k not in _TRANSFER_KEYS} or None
    if holder is not None and params is not None:
        told = {_TRANSFER_KEYS[0]: {PREFIX_HOLDER: holder}}
        params.extra_args = {**(params.extra_args or {}), **told}


def _too_large(structured: Any) -> str:
    choice = structured.choice
    if isinstance(choice, list) and len(choice) > MAX_CHOICES:
        return f"structured output has {len(choice)} choices, at most {MAX_CHOICES} are taken"
    texts = [structured.regex, structured.grammar, structured.structural_tag]
    size = sum(len(text) for text in [*texts, *(choice or ())] if isinstance(text, str))
    schema = structured.json
    if schema is not None:
        size += len(schema) if isinstance(schema, str) else len(json.dumps(schema))
    if size > MAX_STRUCTURED:
        return f"structured output has {size} characters, at most {MAX_STRUCTURED} are taken"
    return ""


def apply_targets(params: Any) -> None:
    """Copy the targets of the HTTP request into `vllm_xargs`.

    A target that the client has given in `vllm_xargs` stays.

    params: vLLM's SamplingParams or PoolingParams."""
    asked = _asked.get()
    if asked is None or not asked.targets or not hasattr(params, "extra_args"):
        return
    params.extra_args = {
        **{key: _number(text) for key, text in asked.targets.items()}, **(params.extra_args or {})
    }  # fmt: skip


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # `why_bad_targets` tells the client


def why_bad_targets(extra: dict[str, Any]) -> str:
    """Return why these `vllm_xargs` name no target that can be used, for the user. Empty: they can
    be used, or name none."""
    for header, key in TARGET_HEADERS.items():
        value = extra.get(key)
        # A bool is an int in Python.
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_MS
        ):
            return (
                f"vllm_xargs.{key} (header {header.decode()}) must be a number of milliseconds, "
                f"above 0 and at most {MAX_MS:g}"
            )
    return ""


def targets_of(params: Any) -> tuple[float | None, float | None]:
    """Return the targets that a request names, for TTFT and for ITL, in milliseconds. None: it
    names none, or one that is no positive number.

    params: vLLM's SamplingParams. None: there are none."""
    extra = getattr(params, "extra_args", None) or {}
    # Frontends refuse such a request. vLLM's own server takes any value, and steps are planned
    # before its requests reach a connector.
    if why_bad_targets(extra):
        return None, None
    return extra.get("ttft_ms"), extra.get("itl_ms")
