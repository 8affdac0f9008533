"""The latency targets that a request may name, in milliseconds: time to its first token (TTFT), and
time between two tokens (ITL).

A client names them in `vllm_xargs`, or in headers of its HTTP request. The frontend copies headers
into `vllm_xargs`, which travel with the request to its decode worker. Of requests that name none,
`router.ttft_ms` and `router.itl_ms` are the targets. No vLLM import here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

HEADERS = {b"x-pullfill-ttft-ms": "ttft_ms", b"x-pullfill-itl-ms": "itl_ms"}
"""The key in `vllm_xargs` of each header."""
MAX_MS = 3.6e6

_named: ContextVar[dict[str, str] | None] = ContextVar("targets", default=None)
"""What the HTTP request that is being served names in its headers."""


def note(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Remember the targets in the headers of an HTTP request, for `apply` in the same context."""
    found = {HEADERS[name]: value.decode("latin-1") for name, value in headers if name in HEADERS}
    if found or _named.get():
        _named.set(found)


def apply(params: Any) -> None:
    """Copy what `note` has found into `vllm_xargs`. What these name already, stays.

    params: vLLM's SamplingParams or PoolingParams."""
    if not (found := _named.get()) or not hasattr(params, "extra_args"):
        return
    params.extra_args = {
        **{key: _number(text) for key, text in found.items()}, **(params.extra_args or {})
    }  # fmt: skip


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # `why_refused` tells the client


def why_refused(extra: dict[str, Any]) -> str:
    """Return why these `vllm_xargs` name no target that can be used, for the user. Empty: they can
    be used, or name none."""
    for header, key in HEADERS.items():
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


def targets(params: Any) -> tuple[float | None, float | None]:
    """Return the targets of a request for TTFT and ITL. None: it names none.

    params: vLLM's SamplingParams. None: there are none."""
    extra = getattr(params, "extra_args", None) or {}
    return extra.get("ttft_ms"), extra.get("itl_ms")
