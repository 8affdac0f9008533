"""One owner with all that a decode worker offers: regions to map, and a port for streams.

The fence file decides for every offer. What a peer maps (shm) is fenced by the peer's own lock;
what comes through the port is fenced by our receiving thread's. `CombinedOwner.fences` puts the two
together: a revoke that finds a receiver of ours waiting for its peer interrupts it.

Life: the engine's memory is registered → `CombinedOwner` (owns the base, makes the server) →
`listen` → published → `close`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pullfill.net.security import ClusterKey
from pullfill.runtime import failpoints
from pullfill.transfer.contract import LocalMemory, OwnerFences
from pullfill.transfer.copying import corrupt
from pullfill.transfer.session import FenceHold
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.shm.owner import FenceOwner
from pullfill.transfer.stream.backend_contract import BackendKind
from pullfill.transfer.stream.peer import endpoint_of
from pullfill.transfer.stream.server import StreamServer
from pullfill.transfer.stream.socket_connection import STALL_S
from pullfill.wire import FenceToken


class CombinedOwner:
    """Owner over `base`, which it owns. Thread-safe once it listens."""

    def __init__(
        self,
        base: FenceOwner,
        memories: Sequence[LocalMemory],
        *,
        instance_id: str,
        kinds: Mapping[str, BackendKind] | None = None,
        key: ClusterKey | None = None,
        offered: frozenset[str] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """memories: by rank, each as this process maps it. kinds: the backends to serve, by name.
        offered: names of transports to publish (None: all that work)."""
        self._base = base
        self._memories = list(memories)
        self._kinds = {
            name: kind
            for name, kind in (kinds or {}).items()
            if (offered is None or name in offered) and kind.why_not() is None
        }
        self._offered = offered
        self._advertised = ""
        self._server = StreamServer(
            instance_id,
            self._memories,
            self._kinds,
            self._open_gate,
            lambda token, writes: self._fences.granted(token, writes=writes),
            key=key,
            stall_s=stall_s,
        )
        self._fences = _Fences(base.fences, self._server)

    def listen(self, host: str, port: int = 0, advertise: str | None = None) -> None:
        """Serve the backends, if there are any. advertise: published instead of the bound address
        (a forwarded port). Raises ConfigError."""
        if self._kinds:
            self._server.start(host, port)
            self._advertised = advertise or self._server.address

    def endpoints(self, rank: int = 0) -> dict[str, str]:
        """See Owner."""
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
        return self._fences

    @property
    def connections(self) -> int:
        """Peers connected to the port."""
        return self._server.connections

    def renew(self, incarnation: str) -> None:
        """See Owner."""
        self._base.renew(incarnation)

    def close(self) -> None:
        """See Owner. The fences first, so that nothing new begins."""
        self._fences.close()
        self._server.close()
        for kind in self._kinds.values():
            kind.close()
        self._base.close()

    def _open_gate(self, incarnation: str) -> FenceHold:
        return _ReceiverHold(self._base.open_fence(), incarnation)


_NOTHING: tuple[int, frozenset[int], frozenset[int]] = (-1, frozenset(), frozenset())


class _Fences:
    """OwnerFences of the file; remembers what was granted, and wakes receivers that wait."""

    def __init__(self, fences: OwnerFences, server: StreamServer) -> None:
        self._fences = fences
        self._server = server
        self._granted: dict[int, tuple[int, frozenset[int], frozenset[int]]] = {}

    @property
    def in_use(self) -> int:
        return self._fences.in_use

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        """See OwnerFences."""
        token = self._fences.open(block_ids, first_target)
        blocks = [int(block) for block in block_ids]
        self._granted[token.slot] = (
            token.epoch,
            frozenset(blocks),
            frozenset(blocks[first_target:]),
        )
        return token

    def try_revoke(self, token: FenceToken) -> bool:
        """See OwnerFences."""
        if not self._fences.try_revoke(token):
            self._server.interrupt(token)
            return False
        if self.granted(token, writes=False) is not None:
            self._granted.pop(token.slot, None)
        return True

    def granted(self, token: FenceToken, *, writes: bool) -> frozenset[int] | None:
        """The blocks that may be read, or written, under a token that is not yet proved dead; None
        for any other token, which the file refuses."""
        epoch, readable, writable = self._granted.get(token.slot, _NOTHING)
        if epoch != token.epoch:
            return None
        return writable if writes else readable

    def close(self) -> None:
        self._fences.close()


class _ReceiverHold(ShmHold):
    """The gate of one of our own receiving threads, with failpoints of its own."""

    def before_batch(self, verb: str) -> None:
        failpoints.hit(f"kv.{verb}.before_batch")

    def inside_batch(self, verb: str) -> None:
        failpoints.hit(f"kv.{verb}.batch")

    def copied(self, verb: str, address: int) -> None:
        if failpoints.hit(f"kv.{verb}.corrupt"):
            corrupt(address)
