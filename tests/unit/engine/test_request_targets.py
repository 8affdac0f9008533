"""Targets of a request, from its headers or its vllm_xargs."""

from __future__ import annotations

from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import request_limits, request_targets

TTFT, ITL = b"x-pullfill-ttft-ms", b"x-pullfill-itl-ms"


def applied(headers: list[tuple[bytes, bytes]], extra: dict[str, Any] | None = None) -> Any:
    params = SimpleNamespace(extra_args=extra)

    def run() -> None:
        request_targets.note(headers)
        request_targets.apply(params)

    copy_context().run(run)
    return params


def test_headers_become_targets() -> None:
    params = applied([(TTFT, b"250"), (ITL, b"12.5"), (b"host", b"x")])
    assert request_targets.targets(params) == (250.0, 12.5)


def test_vllm_xargs_come_first_and_the_rest_stays() -> None:
    params = applied([(TTFT, b"250")], {"ttft_ms": 99, "other": 1})
    assert params.extra_args == {"ttft_ms": 99, "other": 1}


def test_without_headers_nothing_is_touched() -> None:
    assert applied([(b"host", b"x")]).extra_args is None
    assert request_targets.targets(None) == (None, None)


def test_a_request_does_not_inherit_what_one_before_named() -> None:
    """A connection that is kept serves its requests in one context."""
    params = SimpleNamespace(extra_args=None)

    def run() -> None:
        request_targets.note([(TTFT, b"250")])
        request_targets.note([(b"host", b"x")])
        request_targets.apply(params)

    copy_context().run(run)
    assert params.extra_args is None


@pytest.mark.parametrize("value", ["soon", -1, 0, float("nan"), float("inf"), True, [5], 4e6])
def test_what_is_no_time_is_refused(value: Any) -> None:
    why = request_limits.why_refused(SimpleNamespace(extra_args={"itl_ms": value}))
    assert "vllm_xargs.itl_ms" in why
    assert "x-pullfill-itl-ms" in why


def test_a_header_that_is_no_number_is_refused() -> None:
    assert "ttft_ms" in request_limits.why_refused(applied([(TTFT, b"soon")]))
    assert request_limits.why_refused(applied([(TTFT, b"1e3")])) == ""
