"""Whose fault a failed request is: by what failed, and in whose code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pullfill.engine.blame import Fault, fault_of
from pullfill.errors import BadMessage, ConfigError


def code(package: str, body: str, **names: object) -> Callable[[], None]:
    """A function `f` in a module of that package."""
    space: dict[str, object] = {"__name__": f"{package}.x", **names}
    exec(f"def f():\n    {body}\n", space)
    made = space["f"]
    assert callable(made)
    return made


def failure(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as exc:
        return exc
    raise AssertionError("it did not fail")


class VLLMClientError(Exception):
    """vLLM's, by its name."""


def ours(inner: Callable[[], None]) -> Callable[[], None]:
    return code("pullfill.engine", "g()", g=inner)


VALUE = "raise ValueError('no')"
CASES = {
    "vLLM refuses a value": (code("vllm", VALUE), Fault.REQUEST),
    "vLLM, called by us": (ours(code("vllm", VALUE)), Fault.REQUEST),
    "what vLLM calls": (code("vllm", "int('x')"), Fault.REQUEST),
    "a library, called by vLLM": (code("vllm", "g()", g=code("json", VALUE)), Fault.REQUEST),
    "vLLM does not expect it": (code("vllm", "None.a"), Fault.OURS),
    "vLLM finds no key": (code("vllm", "{}[1]"), Fault.OURS),
    "our own code": (ours(lambda: int("x")), Fault.OURS),
    "a library, called by us": (ours(code("json", VALUE)), Fault.OURS),
    "our own code, called by vLLM": (
        code("vllm", "g()", g=code("pullfill.frontend", VALUE)),
        Fault.OURS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_vllm_refuses_is_the_fault_of_the_request(case: str) -> None:
    function, fault = CASES[case]
    assert fault_of(failure(function)) is fault


@pytest.mark.parametrize("exc", [BadMessage("x"), ConfigError("x"), VLLMClientError("x")])
def test_what_is_raised_to_refuse_is_the_fault_of_the_request(exc: Exception) -> None:
    assert fault_of(exc) is Fault.REQUEST
