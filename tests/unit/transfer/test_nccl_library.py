"""Which libnccl is loaded, and which message tells that none can be used."""

from __future__ import annotations

import ctypes
import pwd
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.nccl import library


class Found:
    """A library with all functions of NCCL but the `missing` ones."""

    def __init__(self, *missing: str) -> None:
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nccl") or name in self._missing:
            raise AttributeError(name)
        setattr(self, name, lambda *_: 0)
        return getattr(self, name)


def test_calls_that_wait_for_the_gpu_give_up_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, quick = Found(), Found()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: waiting)
    monkeypatch.setattr(ctypes, "PyDLL", lambda *_: quick)
    found = library.load()
    assert found.ncclGroupEnd is quick.ncclGroupEnd
    assert found.ncclGroupEndOfAborts is waiting.ncclGroupEnd
    assert found.ncclCommAbort is waiting.ncclCommAbort


def test_none_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("cannot open shared object file")))
    with pytest.raises(TransferFailed, match="nvidia-nccl-cu13"):
        library.load()


def test_one_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CDLL", "PyDLL"):
        monkeypatch.setattr(ctypes, name, lambda *_: Found("ncclCommRevoke"))
    with pytest.raises(TransferFailed, match=r"2\.28\.7 or newer"):
        library.load()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where NCCL's files may be: `home`, `etc`, `own`. None is there."""
    (tmp_path / "home").mkdir()
    for name in ("NCCL_COMM_BLOCKING", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    monkeypatch.setattr(library, "SYSTEM", tmp_path / "etc")
    return tmp_path


@pytest.mark.parametrize("place", ["home/.nccl.conf", "etc", "own"])
def test_blocking_communicators_by_force_are_refused(
    places: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "own":
        monkeypatch.setenv("NCCL_CONF_FILE", str(places / "own"))
    assert library.blocking_forced() is None
    (places / place).write_text(
        "#NCCL_COMM_BLOCKING=0\r\nNCCL_DEBUG=WARN\nNCCL_COMM_BLOCKING=1\r\n"
    )
    assert f"NCCL_COMM_BLOCKING=1 in {places / place}" in str(library.blocking_forced())
    for value in ("0", ""):
        monkeypatch.setenv("NCCL_COMM_BLOCKING", value)
        assert library.blocking_forced() is None, "the environment comes first"
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    assert "NCCL_COMM_BLOCKING=1 in the environment" in str(library.blocking_forced())
