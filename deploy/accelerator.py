"""Tells what workers compute on: CPU or GPUs. Imports the standard library only, for install.py."""

from __future__ import annotations

import os
import re
import subprocess

DEVICE_ENV = "PULLFILL_DEVICE"
DEVICES = ("cpu", "cuda13")
_CUDA = 13  # what the wheels of the pinned vLLM and its torch are built for


def _nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def visible() -> list[str] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES names, each once. None: it is not set."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return None
    found = (part.strip() for part in names.split(","))
    return list(dict.fromkeys(part for part in found if part not in ("", "-1")))


def gpu_count() -> int:
    """Return the number of CUDA devices that workers may use. 0 with PULLFILL_DEVICE=cpu."""
    if os.environ.get(DEVICE_ENV) == "cpu":
        return 0
    names = visible()
    if names is not None:
        return len(names)
    return sum(line.startswith("GPU ") for line in _nvidia_smi("-L").splitlines())


def detect() -> str:
    """Return `cpu` or `cuda13`: PULLFILL_DEVICE if set, else what nvidia-smi says of the driver.

    Raises ValueError, which says what to do, if PULLFILL_DEVICE is neither or the driver too old.
    """
    wanted = os.environ.get(DEVICE_ENV)
    if wanted:
        if wanted not in DEVICES:
            raise ValueError(f"{DEVICE_ENV}={wanted!r}: use one of {', '.join(DEVICES)}")
        return wanted
    found = re.search(r"CUDA Version:\s*(\d+)([.]\d+)?", _nvidia_smi())
    if found is None:
        return "cpu"
    if int(found[1]) < _CUDA:
        raise ValueError(
            f"NVIDIA's driver here is for CUDA {found[1]}{found[2] or ''}, vLLM's wheel for CUDA "
            f"{_CUDA}: install driver 580 or newer, or the CPU build with {DEVICE_ENV}=cpu"
        )
    return f"cuda{_CUDA}"


def why_not_mig() -> str | None:
    """Return why `up` cannot use GPUs that MIG has split, for people. None: it can."""
    # Workers in one MIG instance share its memory. Between two instances CUDA allows neither IPC
    # nor copies, so no transport moves KV.
    if os.environ.get(DEVICE_ENV) == "cpu":
        return None
    names = visible()
    if names is None:
        split = any(line.lstrip().startswith("MIG ") for line in _nvidia_smi("-L").splitlines())
    else:
        split = len(names) > 1 and any(name.startswith("MIG-") for name in names)
    if not split:
        return None
    return (
        "MIG has split a GPU, and KV cannot move from one MIG instance to another: set "
        "CUDA_VISIBLE_DEVICES to one instance (MIG-..., see nvidia-smi -L) for all workers, or to "
        "whole GPUs"
    )
