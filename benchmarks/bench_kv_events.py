"""What vLLM's KV cache events cost a decode worker: `make bench-kv-events`.

vLLM's KVCacheManager runs alone, with events and without, in turns. Prompts of --blocks blocks are
stored; as many blocks are evicted for each. Per 1,000 blocks:
  engine thread    vLLM makes the events, and `Publisher` takes them, at the end of each prompt
  asyncio thread   `Held` hashes the blocks and finds the hashes of those that are removed
Prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from pullfill.decode_worker.kv_events import Held
from pullfill.engine.kv_events import Change, Removed, Stored


class Run:
    """A cache that is full, so that each prompt evicts as much as it stores."""

    def __init__(self, blocks: int, events: bool) -> None:
        from tests.support.prefix_cache import BLOCK, Cache

        self.size = blocks * BLOCK
        self.cache = Cache(4 * blocks)
        self.cache.manager.block_pool.enable_kv_cache_events = events
        self.changes: list[Change] = []
        self.cache.events.take = self.changes.extend
        self.number = 0
        for _ in range(4):
            self.prompt()

    def prompt(self) -> float:
        """Store one prompt. Returns the seconds of the engine thread."""
        self.number += 1
        first = self.number * self.size
        request: Any = self.cache.request(list(range(first, first + self.size)))
        self.changes.clear()
        began = time.perf_counter()
        assert self.cache.run(request)
        self.cache.step_ends()
        took = time.perf_counter() - began
        self.cache.manager.free(request)
        return took

    def hashed(self, held: Held) -> float:
        """Take the changes of the last prompt. Returns the seconds of the asyncio thread."""
        began = time.perf_counter()
        for change in self.changes:
            if isinstance(change, Stored):
                held.store(change)
            elif isinstance(change, Removed):
                held.remove(change)
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1000, help="in a prompt")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    from vllm import envs

    runs = {events: Run(options.blocks, events) for events in (False, True)}
    envs.enable_envs_cache()  # as in an engine
    held = Held(runs[True].cache.events.places)
    took: dict[str, list[float]] = {"off": [], "on": [], "hashed": []}
    for _ in range(options.rounds):
        took["off"].append(runs[False].prompt())
        took["on"].append(runs[True].prompt())
        took["hashed"].append(runs[True].hashed(held))
    best = {name: 1e6 / options.blocks * min(times) for name, times in took.items()}
    middle = {name: 1e6 / options.blocks * statistics.median(times) for name, times in took.items()}
    print(f"prompts of {options.blocks} blocks; ms per 1,000 blocks stored and 1,000 removed")
    for name, what in (
        ("off", "engine thread without events"),
        ("on", "engine thread with events"),
        ("hashed", "asyncio thread"),
    ):
        print(f"{what:32} {middle[name]:6.2f}  (best {best[name]:.2f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
