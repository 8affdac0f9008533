"""vLLM's KV cache events, taken in process: which blocks the prefix cache has gained and lost.

vLLM's scheduler gives the events of a step to its `kv_event_publisher`. From `attach` on `KvEvents`
gets them, too. A publisher that the user has configured (--kv-events-config) still gets every event
as vLLM would tell it.

An event names a block by vLLM's own hash. It is a handle here: bytes that name the block until it
is removed, and mean nothing to other processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

INTS = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of one prompt that are cached now, in the order of the prompt.

    place: a bit: the KV cache group and the memory that hold them.
    handles: of each block.
    parent: handle of the block before them. None: they begin the prompt.
    tokens: of all these blocks. Empty: unknown, since the blocks were copied to CPU memory.
    lora: name of the LoRA adapter. Empty: none.
    keys: for each block, what else vLLM's hash of it depends on. None: nothing, for all blocks."""

    place: int
    handles: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    lora: str
    keys: Sequence[tuple[Any, ...] | None] | None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are no longer cached. See Stored."""

    place: int
    handles: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block is cached any more."""


Change = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Places:
    """The KV cache groups that count, each a bit. The same bits, shifted by `count`, stand for
    copies in CPU memory.

    bits: by the group's index in vLLM.
    block_size: tokens per block of these groups."""

    bits: dict[int, int]
    block_size: int

    def complete(self, places: int) -> bool:
        """Whether a block that is at these places can be used."""
        every = (1 << len(self.bits)) - 1
        return (places | places >> len(self.bits)) & every == every


# A block counts where every KV cache group with full attention holds it. Groups with a sliding
# window or with Mamba state are left out: they keep only the end of a prompt. A model without full
# attention counts the blocks of its first group. A block that vLLM has offloaded to CPU memory
# counts like a block in the KV cache, since loading it is faster than computing it.
def places_of(kv_cache_config: Any) -> Places:
    """Return the groups of vLLM's KVCacheConfig whose blocks count."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
    chosen = full or [0]
    size = int(specs[chosen[0]].block_size)
    chosen = [i for i in chosen if specs[i].block_size == size]
    return Places({i: 1 << bit for bit, i in enumerate(chosen)}, size)


# A block counts only if its KV depends on tokens, `cache_salt` and LoRA adapter alone. A block that
# holds a part of an image, or comes after one, is left out.
def origin(stored: Stored) -> tuple[str, int]:
    """Return (cache_salt, number of leading blocks that depend on tokens, salt and LoRA alone).

    The salt is known only if the blocks begin the prompt. Empty: none."""
    if stored.keys is None:
        return "", len(stored.handles)
    salt = ""
    for number, keys in enumerate(stored.keys):
        rest = list(keys or ())
        if stored.lora and stored.lora in rest:
            rest.remove(stored.lora)
        if number == 0 and stored.parent is None and len(rest) == 1 and isinstance(rest[0], str):
            salt = rest.pop()
        if rest:
            return salt, number
    return salt, len(stored.keys)


class KvEvents:
    """The events of one engine. `switch_on` before the engine is built, then `attach`.

    places: without groups, and blocks of 0 tokens, if there are no events."""

    def __init__(self) -> None:
        self._ints = False
        self._manager: Any = None
        self.places = Places({}, 0)

    def switch_on(self, config: Any) -> None:
        """Have vLLM collect events in the engine that is built next. config: its VllmConfig.

        Changes `config` and the environment of this process."""
        from vllm import envs
        from vllm.config.kv_events import KVEventsConfig

        theirs = config.kv_events_config
        if theirs is not None and theirs.enable_kv_cache_events:
            # Whether the user's publisher gets block hashes as integers, which is vLLM's default.
            self._ints = envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
        else:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        os.environ[INTS] = "0"  # only a whole hash can be looked up in the prefix cache

    def attach(self, core: Any, take: Callable[[list[Change]], None]) -> None:
        """Get the events from now on.

        core: vLLM's EngineCore, before its first step.
        take: called with the changes of each step, on the engine thread. It must not block or
        raise."""
        from vllm.distributed import kv_events

        scheduler = core.scheduler
        if not scheduler.kv_cache_manager.block_pool.enable_caching:
            return
        publisher = scheduler.kv_event_publisher
        self._publish, publisher.publish = publisher.publish, self.publish
        self._vllm = kv_events
        self._take = take
        self.places = places_of(scheduler.kv_cache_config)
        self._manager = scheduler.kv_cache_manager
        # Stock vLLM has made the pool before anybody could switch it on.
        scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True

    def look(self) -> None:
        """Take events that came without a step, e.g. of `reset_prefix_cache`. Engine thread."""
        if self._manager is not None and self._manager.block_pool.kv_event_queue:
            events = self._manager.take_events()
            self.publish(self._vllm.KVEventBatch(ts=time.time(), events=events))

    def publish(self, batch: Any) -> None:
        """Take the events of one step, and publish them. batch: vLLM's KVEventBatch."""
        changes: list[Change] = []
        for event in batch.events:
            if isinstance(event, self._vllm.AllBlocksCleared):
                changes.append(Cleared())
            elif not (place := self._place(event)):
                continue
            elif isinstance(event, self._vllm.BlockStored):
                if self._fits(event):
                    changes.append(
                        Stored(place, event.block_hashes, event.parent_block_hash, event.token_ids,
                               event.lora_name or "", event.extra_keys)
                    )  # fmt: skip
            else:
                changes.append(Removed(place, self._lost(event)))
        if changes:
            self._take(changes)
        if self._ints:
            batch.events = [_with_ints(event) for event in batch.events]
        self._publish(batch)

    def _place(self, event: Any) -> int:
        """Return the bit of the event's group and memory. 0: its blocks do not count."""
        bit = self.places.bits.get(event.group_idx, 0)
        medium = event.medium
        if medium == self._vllm.MEDIUM_GPU:
            return bit
        return bit << len(self.places.bits) if medium == self._vllm.MEDIUM_CPU else 0

    def _fits(self, event: Any) -> bool:
        """Whether each block has its tokens. Not so for a part of a block, or in a window."""
        tokens = len(event.token_ids)
        return tokens == len(event.block_hashes) * self.places.block_size or not tokens

    def _lost(self, event: Any) -> Sequence[bytes]:
        """Return which blocks are gone. vLLM's event does not tell of another copy of a block."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        handles: Sequence[bytes] = event.block_hashes
        if event.medium != self._vllm.MEDIUM_GPU:
            return handles
        find = self._manager.block_pool.cached_block_hash_to_block.get_one_block
        keys = [make_block_hash_with_group_id(one, event.group_idx) for one in handles]
        return [one for one, key in zip(handles, keys, strict=True) if find(key) is None]


def _with_ints(event: Any) -> Any:
    """Return the event with hashes as vLLM makes them of the whole ones by default."""
    changed: dict[str, Any] = {}
    if hashes := getattr(event, "block_hashes", None):
        changed["block_hashes"] = [_int(each) for each in hashes]
    if (parent := getattr(event, "parent_block_hash", None)) is not None:
        changed["parent_block_hash"] = _int(parent)
    return msgspec.structs.replace(event, **changed)


def _int(handle: bytes) -> int:
    return int.from_bytes(handle, "big") & ((1 << 64) - 1)
