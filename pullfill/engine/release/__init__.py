"""What differs between the releases of vLLM that pullfill is tested with (pullfill/releases.py).

Each release has a module here, with a class `Release`. That of the newest release defines every
method. That of an older one inherits from the release after it and overrides what was different.
`this` is that of the installed release.

Importing these modules does not import vLLM.
"""

from __future__ import annotations

from importlib import import_module

from pullfill import releases
from pullfill.engine.check import base_version, installed_builds
from pullfill.engine.release.v0_32 import Release


def of(version: str) -> Release:
    """Return what is different in a release of vLLM. version: e.g. `0.32.0`."""
    name = "v" + "_".join(version.split(".")[:2])
    made: Release = import_module(f"{__name__}.{name}").Release()
    return made


_installed = base_version(next(iter(installed_builds().values()), ""))
# A release that is not among them is refused at start-up, with a reason (check.py).
this = of(_installed if _installed in releases.TORCH else releases.VLLM)
