"""A prefill worker that never stops writing: `python -m benchmarks.chaos_writer ETCD NATS NS NAME`.

Every part of a prefill worker is real but its engine: it finds the decode worker in the registry,
pulls a job, claims it, and then writes rubbish into the granted blocks, over and over, until it is
killed. Says `ready` when started, links and pulls after a line on stdin, says `writing` once bytes
are under way. Starting it takes a second instead of ten.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import numpy as np

from pullfill import wire
from pullfill.errors import ClaimRefused, Fenced, PeerUnavailable, QueueUnavailable
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.transfer.contract import PeerSession
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.wire import u32
from tests.support.transfer_rigs import extent, memory_over

RUBBISH = 0xA5


def write_on(session: PeerSession, fence: wire.FenceToken, targets: list[int]) -> None:
    """Write until the fence closes."""
    sources = range(len(targets))
    session.write_blocks(fence, sources, targets)
    print("writing", flush=True)
    with contextlib.suppress(Fenced):
        while True:
            session.write_blocks(fence, sources, targets)


async def main(etcd_url: str, nats_url: str, namespace: str, name: str) -> None:
    etcd = await EtcdClient.connect(etcd_url)
    directory = Directory(etcd, namespace, ["decode"])
    await directory.start()
    (record,) = directory.workers("decode").values()
    compat = record.compat
    assert compat is not None
    descriptor = await directory.descriptor(record.instance_id, 0, expect=compat)
    layout = dense_layout(
        descriptor.num_layers,
        descriptor.num_blocks,
        descriptor.num_kv_heads,
        descriptor.page_bytes,
    )
    rubbish = np.full(extent(layout), RUBBISH, np.uint8)
    session = ShmTransport().connect(memory_over(rubbish, layout), descriptor)
    queue = await JetStreamConsumer.connect(nats_url, QueueConfig(namespace, compat.hash()))
    hello = wire.Hello(prefill_instance=name, compat=compat.hash())
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

    async def nothing(_: wire.WorkerRecord) -> object:
        raise PeerUnavailable("it copies by itself")

    links = DecodeLinks(directory, hello, compat, nothing, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    links.start()
    while True:
        try:
            deliveries = await queue.pull(1, 1, 1.0)
        except QueueUnavailable:
            continue
        for delivery in deliveries:
            job = wire.decode(delivery.body, wire.PrefillJob)
            link = await links.find(job.decode_instance)
            try:
                grant = await link.claim(job.job_id, job.incarnation, delivery.ack_subject)
            except ClaimRefused:
                await delivery.ack()
                continue
            targets = u32.unpack(job.block_ids)[job.hit_tokens // compat.block_size :]
            await asyncio.to_thread(write_on, session, grant.fence, list(targets))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
