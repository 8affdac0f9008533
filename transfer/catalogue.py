"""All transports: which of them work on this machine, and why the others do not.

`device` is the CUDA device that holds this worker's KV memory. None: CPU memory. A backend's module
may need a package or a device. It is imported only when its transport is asked for.

`python -m pullfill.transfer.catalogue` prints the survey of this machine as JSON.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from pullfill.config import TRANSPORTS
from pullfill.errors import ConfigError, PullfillError
from pullfill.net.security import ClusterKey
from pullfill.transfer.contract import LocalMemory, PeerTransport
from pullfill.transfer.cuda_ipc.peer import CudaIpcTransport
from pullfill.transfer.cuda_ipc.writers import why_no_proof
from pullfill.transfer.gpu import cuda
from pullfill.transfer.nixl.devices import confine
from pullfill.transfer.shm.peer import ShmTransport
from pullfill.transfer.stream.backend_contract import BackendKind
from pullfill.transfer.stream.peer import StreamTransport

_BACKENDS = {
    "nccl": ("pullfill.transfer.nccl.nccl_cuda", "make_kind"),
    "nixl": ("pullfill.transfer.nixl.backend", "NixlKind"),
    "tcp": ("pullfill.transfer.tcp.backend", "TcpKind"),
}
BY_NAME = frozenset({"nixl"})
"""Used and offered only where `--transports` names them."""
_ONLY_BY_NAME = "only with --transports nixl: its UCX listens outside pullfill's login"
_NO_MEMORY = "it does not move memory of this kind"


def backends(
    chosen: Collection[str] | None, memory: LocalMemory, host: str = "127.0.0.1"
) -> dict[str, BackendKind]:
    """The stream protocol's backends that work here, by name. The caller closes them.

    chosen: names that `--transports` allows. None: all but those in BY_NAME.
    memory: what they shall move.
    host: the address that this worker binds. A backend that opens ports itself opens them there, if
        it can.

    Raises ConfigError when a name was chosen and does not work."""
    found: dict[str, BackendKind] = {}
    for name in _BACKENDS:
        if name not in (set(_BACKENDS) - BY_NAME if chosen is None else chosen):
            continue
        if name == "nixl":
            confine(host)
        kind, why = _backend(name)
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
    chosen: Collection[str] | None,
    memories: Sequence[LocalMemory],
    key: ClusterKey | None,
    host: str = "127.0.0.1",
) -> list[PeerTransport]:
    """Return the transports by which a worker with such memory reaches others, best first.

    memories: of its ranks. For the other parameters and for ConfigError see `backends`."""
    memory = memories[0]
    gpus = [rank.device for rank in memories if rank.device is not None]
    mapped: dict[str, PeerTransport] = {
        "cuda_ipc": CudaIpcTransport(memory.device, others=gpus),
        "shm": ShmTransport(),
    }
    transports: list[PeerTransport] = []
    for name, transport in mapped.items():
        if chosen is not None and name not in chosen:
            continue
        why = _why_not_mapped(name, memory.device)
        if why is None:
            transports.append(transport)
        elif chosen is not None:
            raise ConfigError(f"--transports {name}: {why}")
    kinds = backends(chosen, memory, host)
    return transports + [StreamTransport(kind, key) for kind in kinds.values()]


def absent(chosen: Collection[str] | None, memory: LocalMemory) -> dict[str, str]:
    """For people: why `peers` does not have the other transports, by name."""
    if chosen is not None:  # those are there, or `peers` raised
        why = "not among this worker's --transports"
        return dict.fromkeys(sorted(set(TRANSPORTS) - set(chosen)), why)
    found = survey(memory.device, [name for name in TRANSPORTS if name not in BY_NAME])
    reasons = {name: why for name, why in found.items() if why is not None}
    return reasons | dict.fromkeys(BY_NAME, _ONLY_BY_NAME)


def survey(device: int | None, names: Iterable[str] = TRANSPORTS) -> Mapping[str, str | None]:
    """For people: each transport, best first, and why it does not work here. None: it works."""
    answers: dict[str, str | None] = {}
    for name in names:
        if name not in _BACKENDS:
            answers[name] = _why_not_mapped(name, device)
            continue
        kind, answers[name] = _backend(name)
        if kind is not None:
            kind.close()
        if name == "tcp" and device is not None:
            answers[name] = _NO_MEMORY
    return answers


def _backend(name: str) -> tuple[BackendKind | None, str | None]:
    module, made = _BACKENDS[name]
    try:
        kind: BackendKind = getattr(importlib.import_module(module), made)()
        return kind, kind.why_not()
    except (ImportError, AttributeError, PullfillError) as exc:
        return None, f"not installed ({exc})"


def _why_not_mapped(name: str, device: int | None) -> str | None:
    if name == "shm":
        return None if device is None else "this worker's KV memory is on a GPU"
    if device is None:
        return "this worker's KV memory is not on a GPU"
    try:
        return why_no_proof(cuda.load(), device)
    except PullfillError as exc:
        return str(exc)


if __name__ == "__main__":
    print(json.dumps(survey(0 if cuda.why_no_cuda() is None else None)))
