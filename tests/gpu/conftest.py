"""Tests that need a CUDA device. Collected everywhere, skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.transfer.layout import dense_layout
from tests.support.gpu_programs import GpuProgram

LAYERS, BLOCKS, HEADS, PAGE = SHAPE = 3, 40, 2, 4096
LAYOUT = dense_layout(*SHAPE)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[GpuProgram]:
    """A process with a KV cache on the first GPU."""
    with GpuProgram("owner", tmp_path, *SHAPE) as program:
        yield program
