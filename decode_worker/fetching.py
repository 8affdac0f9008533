"""Puts the parts together by which decode workers read prefixes from each other.

Each decode worker is a holder (read_leases.py) and an asker (prefix_fetch.py)."""

from __future__ import annotations

from typing import Any

from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.control import ControlServer
from pullfill.decode_worker.fetch_choice import FetchChoice
from pullfill.decode_worker.holders import Holders
from pullfill.decode_worker.kv_reader import reach_any
from pullfill.decode_worker.prefix_fetch import PrefixFetches
from pullfill.decode_worker.read_leases import ReadLeases
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.step_meter import StepMeter
from pullfill.engine.compat import rounding_digest
from pullfill.engine.groups import keeps_all
from pullfill.net.security import ClusterKey
from pullfill.options import WorkerOptions
from pullfill.wire import LeaseHello
from pullfill.worker.process import Engine


def attach(
    engine: Engine[DecodeContext],
    server: RequestServer,
    control: ControlServer,
    meter: StepMeter,
    options: WorkerOptions,
    key: ClusterKey | None,
) -> PrefixFetches | None:
    """Let other decode workers read here, and this one read there. asyncio thread.

    Returns the fetches, to be closed before the KV memory. None: this worker cannot fetch."""
    context, config = engine.context, engine.config
    scheduler, size = context.scheduler, int(config.cache_config.block_size)
    computes = rounding_digest(config)
    control.leases = ReadLeases(
        context, engine.host, server.intake, compat=engine.compat, computes=computes,
        block_size=size, pool=scheduler.pool,
    )  # fmt: skip
    reach = reach_any(context.memories, options, key)
    if reach is None or not keeps_all(context.groups) or not _caches(scheduler.pool):
        return None
    hello = LeaseHello(
        decode_instance=context.instance_id, compat=engine.compat.hash(), computes=computes
    )
    fetches = PrefixFetches(
        Holders(lambda: hello, reach, key),
        block_size=size,
        block_bytes=sum(memory.layout.block_bytes for memory in context.memories),
        wake=engine.host.wake,
    )
    scheduler.fetching = FetchChoice(
        context, fetches, block_size=size, pool=scheduler.pool,
        local_tokens=scheduler.local_tokens, prefill_s=meter.prefill_s,
    )  # fmt: skip
    return fetches


def _caches(pool: Any) -> bool:
    return pool is not None and bool(pool.enable_caching)
