"""NVML by its manual: which GPUs NVLink joins, also those that this process does not see."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from pullfill.transfer.gpu import copies
from pullfill.transfer.gpu.copies import NVLINK, PCIE, link_to
from tests.support.fake_gpu import FakeDriver

A, B, C = ("aa" * 16, "bb" * 16, "cc" * 16)


class Library:
    """libnvidia-ml: A and B are joined, C is on PCIe."""

    started = 0

    def nvmlInit_v2(self) -> int:
        return self.started

    def nvmlDeviceGetHandleByUUID(self, name: ctypes.c_char_p, handle: Any) -> int:
        assert name.value is not None
        text = name.value.decode()
        assert text.startswith("GPU-")
        assert text.count("-") == 5
        found = {A: 1, B: 2, C: 3}.get(text[4:].replace("-", ""))
        handle._obj.value = found
        return 0 if found else 6  # NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetP2PStatus(
        self, one: ctypes.c_void_p, other: ctypes.c_void_p, index: ctypes.c_int, status: Any
    ) -> int:
        assert index.value == 2
        status._obj.value = 0 if {one.value, other.value} == {1, 2} else 5
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    copies._nvml.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: made)
    yield made
    copies._nvml.cache_clear()


def test_nvlink_joins_some_gpus(library: Library) -> None:
    assert copies.nvlink(A, B)
    assert not copies.nvlink(A, C)
    assert not copies.nvlink(A, "dd" * 16)
    assert not copies.nvlink("gpu-a", B)


def test_a_gpu_that_is_hidden_may_be_on_nvlink(library: Library) -> None:
    """`up` shows each worker its own GPUs only."""
    driver = FakeDriver(devices=(A,))
    assert [link_to(driver, 0, uuid) for uuid in (B, C)] == [NVLINK, PCIE]


def test_without_nvml_no_link_is_known(library: Library) -> None:
    library.started = 9  # NVML_ERROR_DRIVER_NOT_LOADED
    assert not copies.nvlink(A, B)
