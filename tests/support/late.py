"""Large modules, imported by the first test that uses them.

vLLM takes five seconds to import and torch two. A run of the quick tests reads all test files
before it forks, and few of its processes run a test that needs such a module. Helm is written in
Go: loaded before a fork, it waits for ever in the child for threads that only the parent has.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

LARGE = ("helm_python", "openai", "torch", "transformers", "vllm")
READ_WITH_TESTS = pytest.StashKey[list[str]]()
"""Large modules that were imported by the time all tests were collected."""


@cache
def uses_late(module: ModuleType | None) -> bool:
    """Whether a test file names a large module."""
    return any(isinstance(value, Late) for value in vars(module).values()) if module else False


def loaded_large() -> list[str]:
    return [name for name in LARGE if name in sys.modules]


class Late:
    """Stands for the module `name`, which is imported when one of its attributes is looked up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every global of a test file for such names
            raise AttributeError(attribute)
        new = self._name not in sys.modules
        module = import_module(self._name)
        if new:
            gc.freeze()  # or every later collection looks at all objects of the module again
        return getattr(module, attribute)
