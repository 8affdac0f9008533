"""Which transports work on this machine, which is best for a peer, and how to connect over it.

`peer_transports` and `backends` make the transports of a worker. For each rank of another worker,
`choose` takes the best one that reaches it. For each part that goes between two ranks
(`layout.plan_routes`), `connect` opens a session. `GroupSession` makes one session of them.

Prefill workers write to decode workers and read from them this way. Decode workers that pull read
from prefill workers this way. `device` is the CUDA device of this worker's KV memory; None: the CPU
can touch it. `python -m pullfill.transfer.connect` prints as JSON each transport, best first, and
why it does not work on this machine (null: it works).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pullfill.config import TRANSPORTS
from pullfill.errors import ConfigError, IncompatibleError, PullfillError
from pullfill.net.security import ClusterKey
from pullfill.transfer.contract import LocalMemory, PeerSession, PeerTransport
from pullfill.transfer.cuda_ipc.ipc_transport import CudaIpcTransport
from pullfill.transfer.cuda_ipc.writers import why_no_proof
from pullfill.transfer.gpu import cuda
from pullfill.transfer.layout import Route, plan_routes, rects_described
from pullfill.transfer.nixl.agent import confine
from pullfill.transfer.session import GroupSession
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.backends import BackendKind
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.wire import RegionDescriptor

logger = logging.getLogger(__name__)

# Characters. A longer reason is cut, because reasons travel in every commit and a library that
# fails to load may say much.
LONGEST_REASON = 300


def pulled_over(memory: LocalMemory, chosen: Collection[str] | None) -> frozenset[str]:
    """The transports that decode workers read from prefill workers over (`--kv-mode pull`): those
    that keep nothing open for a peer that never reads.

    chosen: the names that `--transports` allows. None: all."""
    names = {"shm", "tcp"} if memory.device is None else {"cuda_ipc"}
    return frozenset(names if chosen is None else names & set(chosen))


def choose(
    descriptor: RegionDescriptor, transports: Sequence[PeerTransport]
) -> tuple[PeerTransport, list[tuple[str, str]]]:
    """The best transport that both sides have and that can reach the region.

    Returns the transport, and (name, why not) for each better one. Names outside `TRANSPORTS` come
    last, in the order given. If none reaches the region, raises IncompatibleError with every
    reason; its field is "endpoints".
    """
    why_not: list[tuple[str, str]] = []
    for transport in sorted(transports, key=lambda t: _rank(t.name)):
        if transport.name not in descriptor.endpoints:
            why_not.append((transport.name, "the owner does not offer it"))
            continue
        reason = transport.can_reach(descriptor)
        if reason is None:
            return transport, why_not
        why_not.append((transport.name, reason))
    known = {name for name, _ in why_not}
    why_not += [(name, "not available here") for name in descriptor.endpoints if name not in known]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why_not) or "it offers none"
    raise IncompatibleError(
        f"no transport reaches {descriptor.instance_id} rank {descriptor.rank}: {reasons}",
        field="endpoints",
    )


def why_not_better(
    descriptor: RegionDescriptor, transports: Sequence[PeerTransport], absent: Mapping[str, str]
) -> list[str]:
    """For people: "name: reason" for each transport better than the one that `choose` takes. Raises
    IncompatibleError as `choose` does.

    absent: by name, why a transport is not among `transports`."""
    chosen, why_not = choose(descriptor, transports)
    reasons = dict(absent) | dict(why_not)
    better = TRANSPORTS[: _rank(chosen.name)]
    return [f"{name}: {reasons[name]}"[:LONGEST_REASON] for name in better if name in reasons]


def _rank(name: str) -> int:
    return TRANSPORTS.index(name) if name in TRANSPORTS else len(TRANSPORTS)


def connect(
    memories: Sequence[LocalMemory],
    descriptors: Sequence[RegionDescriptor],
    transports: Sequence[PeerTransport],
) -> PeerSession:
    """One session from all ranks of this worker to all ranks of another one. Blocks: maps or dials.

    descriptors: of the other worker's ranks, in order.

    Raises IncompatibleError, PeerUnavailable, BadMessage, TransferFailed. Then nothing stays open.
    """
    chosen = []
    for descriptor in descriptors:
        transport, why_not = choose(descriptor, transports)
        for name, reason in why_not:
            logger.info("%s: not over %s: %s", descriptor.instance_id, name, reason)
        chosen.append(transport)
    ours, theirs = [m.rect for m in memories], rects_described(descriptors)
    # Every replica of a KV head must be written, but only one of them must be read.
    writes = plan_routes(ours, theirs)
    reads = [Route(r.target, r.source, r.part) for r in plan_routes(theirs, ours)]
    sessions: dict[Route, PeerSession] = {}
    try:
        for key in dict.fromkeys([*writes, *reads]):
            here, there, part = key
            sessions[key] = chosen[there].connect(memories[here], descriptors[there], part)
    except BaseException:
        for session in sessions.values():
            with contextlib.suppress(Exception):  # the caller must hear why there is no session
                session.close()
        raise
    if len(sessions) == 1:
        return sessions[writes[0]]
    return GroupSession([sessions[key] for key in writes], [sessions[key] for key in reads])


_BACKENDS = {  # imported only when asked for: a backend may need a package or a device
    "nccl": ("pullfill.transfer.nccl.nccl_backend", "make_kind"),
    "nixl": ("pullfill.transfer.nixl.nixl_backend", "NixlKind"),
    "tcp": ("pullfill.transfer.stream.tcp_backend", "TcpKind"),
}
# Used and offered only where `--transports` names them.
BY_NAME = frozenset({"nixl"})
_ONLY_BY_NAME = "only with --transports nixl: its UCX listens outside pullfill's login"
_NO_MEMORY = "it does not move memory of this kind"


def backends(
    chosen: Collection[str] | None, memory: LocalMemory, host: str = "127.0.0.1"
) -> dict[str, BackendKind]:
    """The stream protocol's backends that work here, by name.

    chosen: names that `--transports` allows. None: all but those in BY_NAME.
    memory: what they shall move.
    host: the address that this worker binds. A backend that opens ports itself opens them there, if
        it can.

    Raises ConfigError when a name was chosen and does not work."""
    if chosen is not None and "nixl" in chosen:
        confine(host)
    found: dict[str, BackendKind] = {}
    for name in _usable(_BACKENDS, chosen, memory):
        kind = _kind(name)
        if kind.detail(memory) is not None:
            found[name] = kind
        elif chosen is not None:
            raise ConfigError(f"--transports {name}: {_NO_MEMORY}")
    return found


def peer_transports(
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
        "cuda_ipc": CudaIpcTransport(gpus),
        "shm": ShmTransport(),
    }
    found = [mapped[name] for name in _usable(mapped, chosen, memory)]
    kinds = backends(chosen, memory, host)
    return found + [StreamTransport(kind, key) for kind in kinds.values()]


def _usable(
    names: Iterable[str], chosen: Collection[str] | None, memory: LocalMemory
) -> Iterator[str]:
    """Those of `names` that may be used and work here. Raises ConfigError; see `backends`."""
    for name in names:
        if name in BY_NAME if chosen is None else name not in chosen:
            continue
        why = _why_not(name, memory.device)
        if why is None:
            yield name
        elif chosen is not None:
            raise ConfigError(f"--transports {name}: {why}")


def why_absent(chosen: Collection[str] | None, memory: LocalMemory) -> dict[str, str]:
    """For people: why `peer_transports` does not have the other transports, by name."""
    if chosen is not None:  # those are there, or `peer_transports` raised
        others = sorted(set(TRANSPORTS) - set(chosen))
        return dict.fromkeys(others, "not among this worker's --transports")
    names = [name for name in TRANSPORTS if name not in BY_NAME]
    reasons = {name: why for name in names if (why := _why_not(name, memory.device)) is not None}
    return reasons | dict.fromkeys(BY_NAME, _ONLY_BY_NAME)


def _why_not(name: str, device: int | None) -> str | None:
    """For people: why a transport does not work here. None: it works."""
    if name == "shm":
        return None if device is None else "this worker's KV memory is on a GPU"
    if name == "tcp" and device is not None:
        return _NO_MEMORY
    if name == "cuda_ipc" and device is None:
        return "this worker's KV memory is not on a GPU"
    try:
        if name == "cuda_ipc":
            return why_no_proof(cuda.load(), device or 0)
        return _kind(name).why_not()
    except (ImportError, AttributeError) as exc:
        return f"not installed ({exc})"
    except PullfillError as exc:
        return str(exc)


def _kind(name: str) -> BackendKind:
    module, made = _BACKENDS[name]
    kind: BackendKind = getattr(importlib.import_module(module), made)()
    return kind


if __name__ == "__main__":
    device = 0 if cuda.why_no_cuda() is None else None
    print(json.dumps({name: _why_not(name, device) for name in TRANSPORTS}))
