"""What the decode worker knows of its prefill workers together."""

from __future__ import annotations

from typing import Any

from pullfill.decode_worker.peers import Peer, Peers

CHANNEL: Any = None


def test_the_largest_block_of_a_prefill_worker() -> None:
    peers: Peers = Peers()
    assert peers.largest_block == 0
    for name, size in (("a", 0), ("b", 96), ("c", 64)):
        peers[name] = Peer(name, name, CHANNEL, 0.0, block_size=size)
    assert peers.largest_block == 96
