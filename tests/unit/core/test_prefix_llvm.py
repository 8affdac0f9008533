"""What llvmlite's library object answers to."""

from __future__ import annotations

from llvmlite.binding import ffi

import pullfill.prefix.llvm
from pullfill.prefix.llvm import hide


def test_the_library_has_its_functions_and_no_dict() -> None:
    assert pullfill.prefix.llvm is not None
    assert not hasattr(ffi.lib, "__dict__")
    assert ffi.lib.LLVMPY_GetDefaultTargetTriple is not None


def test_an_object_that_answers_to_every_name() -> None:
    class Library:
        __slots__ = ()

        def __getattr__(self, name: str) -> str:
            return f"function {name}"

    assert hasattr(Library(), "__dict__")
    hide(Library)
    assert not hasattr(Library(), "__dict__")
    assert Library().create == "function create"
