"""Compiling with numba."""

from __future__ import annotations

from typing import Any

from pullfill.prefix.kernels import I64, compiled


def test_a_function_compiles_where_nothing_can_be_cached() -> None:
    """numba caches only what comes from a file; one in a folder that cannot be written is alike."""
    scope: dict[str, Any] = {}
    exec("def twice(number):\n    return 2 * number", scope)
    twice: Any = compiled(I64)(scope["twice"])
    assert twice(21) == 42
    assert len(twice.nopython_signatures) == 1


def test_a_function_is_compiled_before_its_first_call() -> None:
    from pullfill.prefix import kernels, table

    for function in (kernels.sip_chain, table.change, table.match, table.collect):
        before: Any = function
        assert len(before.nopython_signatures) == 1
