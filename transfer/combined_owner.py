"""One owner with all that a worker offers: memory to map, and a port for streams.

The fence file decides for every offer. A peer that maps the memory (shm, cuda_ipc) holds the fence
itself. For what comes through the port, our receiving thread holds it.

Life: the engine registers its memory → `CombinedOwner` → `listen` → the endpoints are published →
`close`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pullfill.net.security import ClusterKey
from pullfill.transfer.contract import LocalMemory, OwnerFences
from pullfill.transfer.shm.owner import FenceOwner
from pullfill.transfer.stream.backend_contract import BackendKind
from pullfill.transfer.stream.peer import endpoint_of
from pullfill.transfer.stream.server import StreamServer
from pullfill.transfer.stream.serving import Offer
from pullfill.transfer.stream.socket_connection import STALL_S


class CombinedOwner:
    """Owner over `base` and a server for streams. It owns both, and the backends' kinds.
    Thread-safe once it listens."""

    def __init__(
        self,
        base: FenceOwner,
        memories: Sequence[LocalMemory],
        *,
        instance_id: str,
        kinds: Mapping[str, BackendKind],
        key: ClusterKey | None = None,
        offered: frozenset[str] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """
        memories: by rank, each as this process maps it.
        kinds: the backends to serve, by name.
        offered: which ways to map the memory are published. None: all.
        """
        self._base = base
        self._memories = list(memories)
        self._kinds = dict(kinds)
        self._offered = offered
        self._advertised = ""
        offer = Offer(instance_id, self._memories, self._kinds, base)
        self._server = StreamServer(offer, key=key, stall_s=stall_s)
        base.fences.on_unproved = self._server.interrupt

    def listen(self, host: str, port: int = 0, advertise: str | None = None) -> None:
        """Serve the backends, if there are any. Raises ConfigError.

        advertise: published instead of the bound address (a forwarded port)."""
        if self._kinds:
            self._server.start(host, port)
            self._advertised = advertise or self._server.address

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        offers = {
            name: endpoint
            for name, endpoint in self._base.endpoints(rank).items()
            if self._offered is None or name in self._offered
        }
        for name, kind in self._kinds.items():
            detail = kind.detail(self._memories[rank])
            if detail is not None and self._advertised:
                offers[name] = endpoint_of(self._advertised, detail)
        return offers

    @property
    def fences(self) -> OwnerFences:
        return self._base.fences

    @property
    def connections(self) -> int:
        """How many peers are connected to the port."""
        return self._server.connections

    def renew(self, incarnation: str) -> None:
        self._base.renew(incarnation)

    def close(self) -> None:
        # The fences first, so that nothing new begins.
        self._base.fences.close()
        self._server.close()
        for kind in self._kinds.values():
            kind.close()
        self._base.close()
