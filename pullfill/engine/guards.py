"""Requests that vLLM's checks let through and that then fail, or hold up an engine.

The frontend refuses them. Each guard says what vLLM does with such a request, and
`tests/integration/test_odd_requests.py` sends one. No vLLM import here.
"""

from __future__ import annotations

from typing import Any

_TRANSFER_KEYS = ("kv_transfer_params", "ec_transfer_params")


def why_refused(params: Any) -> str:
    """The reason for the user, or "". params: vLLM's SamplingParams or PoolingParams."""
    extra = getattr(params, "extra_args", None) or {}
    for key in _TRANSFER_KEYS:
        # vLLM reads entries of it before we can drop it: AttributeError in the frontend.
        if extra.get(key) is not None and not isinstance(extra[key], dict):
            return f"vllm_xargs.{key} must be an object, and is ignored if it is: leave it out"
    return ""
