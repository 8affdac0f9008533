"""The decode worker's KV cache as memory that prefill workers can write.

Each rank tells the connector where its memory is while the engine is built. `open_memory` then lets
peers reach it. The rest of its life is the same on both sides (worker/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.decode_worker.context import ConnectorParts
from pullfill.errors import ConfigError, OverloadedError
from pullfill.net.security import ClusterKey
from pullfill.options import WorkerOptions
from pullfill.runtime import log
from pullfill.transfer.connect import backends
from pullfill.transfer.owners import Owner
from pullfill.wire import Compat, FenceToken, RegionDescriptor

logger = log.get("decode_worker.memory")


def open_memory(
    parts: ConnectorParts, incarnation: str, options: WorkerOptions, key: ClusterKey | None
) -> Owner | None:
    """Open the memory of every rank to peers. None: no transport reaches it, so this worker
    prefills every prompt itself. Raises as `offer`."""
    owner = offer(parts, incarnation, options, key) if parts.ranks else None
    if owner is None:
        assert parts.geometry is not None, "the ranks have told their memory"
        logger.warning(
            "no transport reaches KV memory on %s: every prompt is prefilled by this worker%s",
            parts.geometry.device, parts.why_not and f" ({parts.why_not})",
        )  # fmt: skip
        return None
    layouts = [memory.layout for memory in parts.memories]
    logger.info(
        "KV cache shared: %d blocks of %d bytes on %d ranks",
        layouts[0].num_blocks, sum(layout.block_bytes for layout in layouts), len(layouts),
    )  # fmt: skip
    return owner


def offer(
    parts: ConnectorParts, incarnation: str, options: WorkerOptions, key: ClusterKey | None
) -> Owner | None:
    """Open the KV memory to peers over each transport of `options.transports` that works here.

    Returns None if no transport can reach the memory. Closing the owner removes the files, too.
    Raises ConfigError if the port is taken, or if the user has named transports and none of them
    can reach the memory."""
    assert parts.files is not None
    owner = Owner(
        parts.files,
        parts.ranks,
        incarnation,
        instance_id=parts.instance_id,
        kinds=backends(options.transports, parts.memories[0], options.host),
        key=key,
        offered=options.transports,
    )
    try:
        owner.listen(options.host, options.kv_port, options.advertise_kv)
        # A transport that misses one rank brings no KV.
        found = [set(owner.endpoints(rank)) for rank in range(len(parts.ranks))]
        names = sorted(set.intersection(*found))
        if not names and options.transports is not None:
            raise ConfigError(
                f"--transports {','.join(sorted(options.transports))}: none of them reaches this "
                "worker's KV memory (pullfill doctor says why)"
            )
    except BaseException:
        owner.close()
        raise
    if not names:
        owner.close()
        return None
    logger.info("KV can be written over %s", ", ".join(names))
    return owner


def describe(owner: Owner | None, incarnation: str, compat: Compat) -> list[RegionDescriptor]:
    """Describe the memory of each rank under `incarnation`. Empty: no transport reaches it.

    From now on sessions and descriptors of the last incarnation are refused."""
    if owner is None:
        return []
    owner.renew(incarnation)
    return owner.describe(compat)


class NoFences:
    """OwnerFences of memory that no other process can reach. Every grant is refused."""

    in_use = 0

    def open(self, block_ids: Sequence[int], first_target: int = 0) -> FenceToken:
        raise OverloadedError("no transport reaches this worker's KV memory")

    def try_revoke(self, token: FenceToken) -> bool:
        return True
