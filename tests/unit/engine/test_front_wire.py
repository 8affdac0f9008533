"""Messages between frontend and decode worker: greeting, ids, texts of refusals."""

from __future__ import annotations

import msgspec

from pullfill.engine import front_wire


def hello(**changes: str) -> front_wire.FrontendHello:
    base = front_wire.FrontendHello(frontend_instance="f", vllm_version="0.32.0", model="m")
    return msgspec.structs.replace(base, **changes)


def test_hello_is_refused_with_the_field_that_differs_and_both_values() -> None:
    assert (
        front_wire.refuse_hello(hello(), vllm_version="0.32.0+cpu", models=["m", "/path"]) is None
    )
    reason = front_wire.refuse_hello(
        hello(vllm_version="0.31.0"), vllm_version="0.32.0", models=["m"]
    )
    assert reason is not None
    assert all(word in reason for word in ("vllm_version", "0.31.0", "0.32.0"))
    reason = front_wire.refuse_hello(hello(model="x"), vllm_version="0.32.0", models=["m"])
    assert reason is not None
    assert "model differs" in reason


def test_refusal_text_is_printable_whatever_was_sent() -> None:
    assert front_wire.text_of(b"no\x1b[31m \xff" + b"x" * 9999).isprintable()
