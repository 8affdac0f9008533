"""Every transport this build has: which of them work here, and why not the others.

What needs a package or a device is imported only when it is asked for. `device` is everywhere the
CUDA device that holds this worker's KV memory, None for CPU memory.

`python -m pullfill.transfer.catalogue` prints the survey of this machine as JSON.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from pullfill.config import TRANSPORTS
from pullfill.errors import ConfigError, PullfillError
from pullfill.security import ClusterKey
from pullfill.transfer.contract import LocalMemory, PeerTransport
from pullfill.transfer.stream.contract import PlaneKind
from pullfill.transfer.stream.peer import StreamTransport

_PLANES = {
    "nccl": ("pullfill.transfer.nccl.cuda", "make_kind"),
    "nixl": ("pullfill.transfer.nixl.plane", "NixlKind"),
    "tcp": ("pullfill.transfer.tcp.plane", "TcpKind"),
}
_NO_MEMORY = "it does not move memory of this kind"


def planes(chosen: Collection[str] | None, memory: LocalMemory) -> dict[str, PlaneKind]:
    """The planes of the stream protocol that work here, for memory like this, by name. The caller
    closes them. Raises ConfigError when one was asked for by name and does not work."""
    found: dict[str, PlaneKind] = {}
    for name in _PLANES:
        if chosen is not None and name not in chosen:
            continue
        kind, why = _plane(name)
        if kind is not None and why is None and kind.detail(memory) is None:
            why = _NO_MEMORY
        if kind is not None and why is None:
            found[name] = kind
            continue
        if kind is not None:
            kind.close()
        if chosen is not None:
            for other in found.values():
                other.close()
            raise ConfigError(f"--transports {name}: {why}")
    return found


def peers(
    chosen: Collection[str] | None, memory: LocalMemory, key: ClusterKey | None
) -> list[PeerTransport]:
    """How a worker with memory like this reaches others, best first. Raises ConfigError as
    `planes`."""
    mapped = {name: _why_not_mapped(name, memory.device) for name in ("cuda_ipc", "shm")}
    if chosen is not None:
        for name in (n for n in mapped if n in chosen and mapped[n] is not None):
            raise ConfigError(f"--transports {name}: {mapped[name]}")
    transports = [
        _mapped(name, memory.device)
        for name, why in mapped.items()
        if why is None and (chosen is None or name in chosen)
    ]
    kinds = planes(chosen, memory)
    if chosen is None and (nixl := kinds.get("nixl")) is not None and _without_rdma():
        nixl.close()
        del kinds["nixl"]
    return transports + [StreamTransport(kind, key) for kind in kinds.values()]


def absent(chosen: Collection[str] | None, memory: LocalMemory) -> dict[str, str]:
    """Why `peers` does not have the others, for people, by name."""
    reasons = {name: why for name, why in survey(memory.device).items() if why is not None}
    if chosen is None and (why := _without_rdma()):
        reasons.setdefault("nixl", why)
    if chosen is not None:
        reasons |= dict.fromkeys(
            set(TRANSPORTS) - set(chosen), "not among this worker's --transports"
        )
    return reasons


def survey(device: int | None) -> Mapping[str, str | None]:
    """For people: each transport, best first, and why it does not work here (None: it does).
    Imports what is installed."""
    answers: dict[str, str | None] = {}
    for name in TRANSPORTS:
        if name not in _PLANES:
            answers[name] = _why_not_mapped(name, device)
            continue
        kind, answers[name] = _plane(name)
        if kind is not None:
            kind.close()
        if name == "tcp" and device is not None:
            answers[name] = _NO_MEMORY
    return answers


def _plane(name: str) -> tuple[PlaneKind | None, str | None]:
    module, made = _PLANES[name]
    try:
        kind: PlaneKind = getattr(importlib.import_module(module), made)()
        return kind, kind.why_not()
    except (ImportError, AttributeError, PullfillError) as exc:
        return None, f"not installed ({exc})"


def _without_rdma() -> str | None:
    """Why a peer does not take NIXL of its own accord: over TCP, UCX does what our tcp does."""
    if any(Path("/sys/class/infiniband").glob("*")):
        return None
    return "no RDMA device here, where tcp is faster; --transports nixl uses it all the same"


def _why_not_mapped(name: str, device: int | None) -> str | None:
    if name == "shm":
        return None if device is None else "this worker's KV memory is on a GPU"
    if device is None:
        return "this worker's KV memory is not on a GPU"
    from pullfill.transfer.cuda_ipc.writers import why_no_proof

    return why_no_proof()


def _mapped(name: str, device: int | None) -> PeerTransport:
    if name == "shm":
        from pullfill.transfer.shm.peer import ShmTransport

        return ShmTransport()
    from pullfill.transfer.cuda_ipc.peer import CudaIpcTransport

    return CudaIpcTransport(device)


def _a_device() -> int | None:
    from pullfill.transfer.gpu.cuda import load

    try:
        return 0 if load().count() else None
    except PullfillError:
        return None


if __name__ == "__main__":
    print(json.dumps(survey(_a_device())))
