"""What the frontend refuses because vLLM would not; the rest is in test_odd_requests.py."""

from __future__ import annotations

from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import request_limits
from pullfill.engine.request_limits import PREFIX_HOLDER, strip_transfer_params
from pullfill.wire import PrefixHolder


def structured(**given: Any) -> SimpleNamespace:
    fields = dict.fromkeys(("json", "regex", "choice", "grammar", "structural_tag"))
    return SimpleNamespace(structured_outputs=SimpleNamespace(**{**fields, **given}))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SimpleNamespace(stop=["s"] * (request_limits.MAX_STOPS + 1)), "stop has"),
        (SimpleNamespace(extra_args={"ec_transfer_params": 3}), "ec_transfer_params"),
        (structured(choice=["a"] * (request_limits.MAX_CHOICES + 1)), "choices"),
        (structured(regex="a" * (request_limits.MAX_STRUCTURED + 1)), "characters"),
        (structured(json={"const": "a" * request_limits.MAX_STRUCTURED}), "characters"),
        (SimpleNamespace(), ""),  # a pooling request
        (SimpleNamespace(stop=["s"] * request_limits.MAX_STOPS), ""),
        (SimpleNamespace(extra_args={"kv_transfer_params": {}}), ""),
        (structured(choice=["a"] * request_limits.MAX_CHOICES), ""),
        (structured(json="a" * request_limits.MAX_STRUCTURED), ""),
    ],
)
def test_too_much_is_refused_with_a_reason_and_what_fits_passes(params: Any, words: str) -> None:
    why = request_limits.why_refused(params)
    assert words in why
    assert bool(why) == bool(words)


def test_the_choices_of_one_http_request_are_counted_together() -> None:
    def asked(*choices: int) -> list[bool]:
        return [bool(request_limits.why_too_many(n, 128)) for n in choices]

    def serve() -> None:
        request_limits.begin([])
        assert asked(100, 28, 1) == [False, False, True]
        request_limits.begin([])
        assert asked(128) == [False]
        request_limits.submitted()  # the next step of a beam search, or of a tool's loop
        assert asked(128, 1) == [False, True]

    copy_context().run(serve)
    assert asked(128, 128) == [False, False], "no HTTP request"


def test_the_hint_takes_the_place_of_what_a_client_says() -> None:
    holder = PrefixHolder(instance_id="h", control="tcp://h:1", tokens=64)
    said = {"kv_transfer_params": {"do_remote_prefill": True}, "ttft_ms": 5}
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=said))
    strip_transfer_params(request, holder)
    told = request.sampling_params.extra_args
    assert told == {"kv_transfer_params": {PREFIX_HOLDER: holder}, "ttft_ms": 5}
    assert said["kv_transfer_params"] == {"do_remote_prefill": True}, "the client's own"
    strip_transfer_params(request)
    assert request.sampling_params.extra_args == {"ttft_ms": 5}
    pooling = SimpleNamespace(sampling_params=None)
    strip_transfer_params(pooling, holder)
    assert pooling.sampling_params is None


TTFT, ITL = b"x-pullfill-ttft-ms", b"x-pullfill-itl-ms"


def applied(*requests: list[tuple[bytes, bytes]], extra: dict[str, Any] | None = None) -> Any:
    """The parameters of the last of these requests, by headers, of one connection."""
    params = SimpleNamespace(extra_args=extra)

    def run() -> None:
        for headers in requests:
            request_limits.begin(headers)
        request_limits.apply_targets(params)

    copy_context().run(run)
    return params


def test_headers_become_targets_of_their_request_unless_it_names_others() -> None:
    host = (b"host", b"x")
    params = applied([(TTFT, b"250"), (ITL, b"12.5"), host])
    assert request_limits.targets_of(params) == (250.0, 12.5)
    params = applied([(TTFT, b"250")], extra={"ttft_ms": 99, "other": 1})
    assert params.extra_args == {"ttft_ms": 99, "other": 1}
    assert applied([host]).extra_args is None
    # A connection that is kept serves its requests in one context.
    assert applied([(TTFT, b"250")], [host]).extra_args is None
    assert request_limits.targets_of(None) == (None, None)


@pytest.mark.parametrize("value", ["soon", -1, 0, float("nan"), float("inf"), True, [5], 4e6])
def test_what_is_no_time_is_refused(value: Any) -> None:
    params = SimpleNamespace(extra_args={"ttft_ms": 9.0, "itl_ms": value})
    why = request_limits.why_refused(params)
    assert "vllm_xargs.itl_ms" in why
    assert request_limits.targets_of(params) == (None, None), "vLLM's own server refuses none"
    assert "x-pullfill-itl-ms" in why


def test_a_header_that_is_no_number_is_refused() -> None:
    assert "ttft_ms" in request_limits.why_refused(applied([(TTFT, b"soon")]))
    assert request_limits.why_refused(applied([(TTFT, b"1e3")])) == ""
