"""Opens a decode worker's KV memory to prefill workers: memory to map, and a port for streams."""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.errors import ConfigError
from pullfill.net.security import ClusterKey
from pullfill.options import WorkerOptions
from pullfill.runtime import log
from pullfill.transfer.connect import backends
from pullfill.transfer.contract import LocalMemory, Owner
from pullfill.transfer.owners import CombinedOwner
from pullfill.transfer.shm.shm_transport import FenceOwner

logger = log.get("decode_worker.offers")


def offer(
    base: FenceOwner,
    memories: Sequence[LocalMemory],
    *,
    instance_id: str,
    options: WorkerOptions,
    key: ClusterKey | None,
) -> Owner | None:
    """Open the KV memory to peers over each transport of `options.transports` that works here.

    Returns one owner for all transports, or None if no transport can reach the memory. Closing the
    owner closes `base` too. Raises ConfigError if the port is taken, or if the user has named
    transports and none of them can reach the memory.

    base: the owner of the fence over the memory.
    memories: the KV memory of each rank."""
    owner = CombinedOwner(
        base,
        memories,
        instance_id=instance_id,
        kinds=backends(options.transports, memories[0], options.host),
        key=key,
        offered=options.transports,
    )
    try:
        owner.listen(options.host, options.kv_port, options.advertise_kv)
        # A transport that misses one rank brings no KV.
        found = [set(owner.endpoints(rank)) for rank in range(len(memories))]
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
