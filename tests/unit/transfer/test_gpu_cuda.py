"""What is made of the CUDA driver's answers, against a library with the same names. What its calls
do is for tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu import cuda
from pullfill.transfer.gpu.cuda import CudaDriver

COLUMN = np.array([16, 32], np.uint64)


class Library:
    """libcuda as ctypes shows it.

    codes: what a call returns. gives: what it puts into its first pointer."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.gives: dict[str, Any] = {"cuGetErrorName": b"CUDA_ERROR_X", "cuStreamCreate": 77}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name in self.gives:
                pointer = next(a for a in arguments if hasattr(a, "_obj"))
                pointer._obj.value = self.gives[name]
            return self.codes.get(name, 0)

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cuda.ctypes, "PyDLL", lambda name: made)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: made)
    return made


@pytest.mark.parametrize(
    "name",
    ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamCreate",
     "cuCtxSynchronize"],
)  # fmt: skip
def test_errors_carry_cudas_name(library: Library, name: str) -> None:
    library.codes[name] = 700

    def copy() -> None:
        driver = CudaDriver()
        stream = driver.stream(0)
        stream.copy_batch(COLUMN, COLUMN, COLUMN)
        stream.synchronize()
        driver.synchronize(0)

    with pytest.raises(TransferFailed, match=f"{name}: CUDA_ERROR_X"):
        copy()


def test_a_stream_is_done_or_busy_or_failed(library: Library) -> None:
    """CUDA_ERROR_NOT_READY is 600; whatever else is no answer to wait on."""
    stream = CudaDriver().stream(0)
    assert stream.done
    library.codes["cuStreamQuery"] = 600
    assert not stream.done
    library.codes["cuStreamQuery"] = 700
    with pytest.raises(TransferFailed, match="cuStreamQuery: CUDA_ERROR_X"):
        assert stream.done


def test_memory_of_another_gpu_or_of_the_cpu_is_not_ours(library: Library) -> None:
    driver = CudaDriver()
    library.gives["cuMemGetAddressRange_v2"] = 4096
    with pytest.raises(TransferFailed, match="not memory of device 0"):
        driver.allocation(0, 5000)
    library.gives["cuPointerGetAttribute"] = 2  # CU_MEMORYTYPE_DEVICE, and of device 2
    with pytest.raises(TransferFailed, match="not memory of device 0"):
        driver.allocation(0, 5000)
    assert driver.allocation(2, 5000) == (4096, 0, True)
    assert driver.extent(0, 5000)[0] == 4096, "whichever device holds it"


def test_settings_that_cannot_be_read(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver()
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError("no params")))
    with pytest.raises(TransferFailed, match="settings cannot be read: no params"):
        driver.settings()
    monkeypatch.setattr(Path, "read_text", lambda _: "EnableMSI: 1")
    assert driver.settings() == "EnableMSI: 1"


def test_mps(library: Library) -> None:
    driver = CudaDriver()
    assert not driver.shares_contexts(0)
    library.gives["cuDeviceGetAttribute"] = 1
    assert driver.shares_contexts(0)
    library.codes["cuDeviceGetAttribute"] = 1  # CUDA_ERROR_INVALID_VALUE: older than 12.2
    with pytest.raises(TransferFailed, match="cuDeviceGetAttribute: CUDA_ERROR_X"):
        driver.shares_contexts(0)
