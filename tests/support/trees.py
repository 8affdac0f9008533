"""Syntax trees of many source files."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def many_trees() -> Iterator[None]:
    """Collect no garbage inside. What exists at the end is never looked at for garbage.

    Trees have so many parts that the collector takes as long as reading the files."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
