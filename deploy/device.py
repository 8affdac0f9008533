"""What this machine computes on. Standard library only: the installer runs before anything else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

DEVICE_ENV = "PULLFILL_DEVICE"
DEVICES = ("cpu", "cuda12", "cuda13")


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def visible(env: Mapping[str, str]) -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES names, each once; None if it is not set."""
    names = env.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return None
    found = (part.strip() for part in names.split(","))
    return list(dict.fromkeys(part for part in found if part not in ("", "-1")))


def gpu_count() -> int:
    """CUDA devices that workers may use; 0 when PULLFILL_DEVICE=cpu."""
    if os.environ.get(DEVICE_ENV) == "cpu":
        return 0
    names = visible(os.environ)
    if names is not None:
        return len(names)
    return sum(line.startswith("GPU ") for line in _nvidia_smi("-L").splitlines())


def detect() -> str:
    """`cpu`, `cuda12` or `cuda13`: PULLFILL_DEVICE, else what nvidia-smi says of the driver.

    Raises ValueError when PULLFILL_DEVICE is none of them.
    """
    wanted = os.environ.get(DEVICE_ENV)
    if wanted:
        if wanted not in DEVICES:
            raise ValueError(f"{DEVICE_ENV}={wanted!r}: use one of {', '.join(DEVICES)}")
        return wanted
    found = re.search(r"CUDA Version:\s*(\d+)", _nvidia_smi())
    if found is None:
        return "cpu"
    return "cuda13" if int(found[1]) >= 13 else "cuda12"
