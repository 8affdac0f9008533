"""Publishes the blocks of this worker's prefix cache to the frontends that follow it.

    engine thread      `_take`: puts a step's changes into a queue
    asyncio thread     hashes and numbers them, at most every _FLUSH_S
    engine thread      the request server sends what is new to each frontend that follows

A frontend that asks (PrefixFollow) is sent a snapshot in pages first. It asks again if it misses an
event. No history is kept for that: a connection that falls behind ends (docs/decisions.md, 27).

vLLM's name of a block is a handle here: it leads to our hash of the block when vLLM removes it.
There are as many handles as cached blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pullfill import wire
from pullfill.engine.kv_events import Change, Cleared, KvEvents, Places, Removed, Stored, origin
from pullfill.engine.view import View
from pullfill.prefix import chain
from pullfill.prefix.events import Original
from pullfill.runtime import failpoints, log
from pullfill.wire import u32
from pullfill.wire.prefix import Op

logger = log.get("decode_worker.kv_events")

# Steps in the queue. If there are more, the asyncio thread hangs, and all blocks are forgotten.
_MOST_STEPS = 10_000
# New events are sent at most this often. After a pause they are sent at once.
_FLUSH_S = 0.05
# (payload, identity of a frontend or None for all that follow).
Send = Callable[[bytes, bytes | None], None]


class Held:
    """Our hashes of the cached blocks, by handle, and where vLLM holds them."""

    def __init__(self, places: Places) -> None:
        self._size = places.block_size
        self._complete = places.complete
        # By handle: our hash of the block, and the bits of where vLLM holds it (0: nowhere yet).
        self._known: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def store(self, stored: Stored) -> list[int]:
        """Note stored blocks. Returns the hashes of those that count from now on."""
        if stored.tokens:
            self._name(stored)
        new = []
        for handle in stored.handles:
            if (known := self._known.get(handle)) is None:
                continue  # its KV depends on more than text, or it was removed before the copy
            one, before = known
            now = before | stored.place
            self._known[handle] = one, now
            if self._complete(now) and not self._complete(before):
                new.append(one)
        return new

    def remove(self, removed: Removed) -> list[int]:
        """Note removed blocks. Returns the hashes of those that no longer count."""
        gone = []
        for handle in removed.handles:
            if (known := self._known.pop(handle, None)) is None:
                continue
            one, before = known
            now = before & ~removed.place
            if self._complete(before) and not self._complete(now):
                gone.append(one)
            if now:
                self._known[handle] = one, now
        return gone

    def clear(self) -> None:
        self._known.clear()

    def _name(self, stored: Stored) -> None:
        """Give the blocks their hashes. None if the block before them has none."""
        salt, count = origin(stored)
        parent: int | None
        if stored.parent is None:
            parent = chain.root(salt or None, stored.lora or None, self._size)
        else:
            parent, _ = self._known.get(stored.parent, (None, 0))
        if parent is None or all(handle in self._known for handle in stored.handles):
            return
        tokens = u32.pack(stored.tokens[: count * self._size])
        found = chain.extend(parent, tokens, self._size)
        for handle, one in zip(stored.handles, found, strict=False):
            self._known.setdefault(handle, (one, 0))


class BlockEvents:
    """Publishes which blocks an engine's prefix cache gains and loses.

    Make it on the engine thread, before the first step."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        view: View,  # of the engine
        events: KvEvents,
    ) -> None:
        self._loop = loop
        self._send: Send | None = None  # nobody has followed yet
        view.tell_blocks(events, self._take)
        self._held = Held(events.places)
        self._original = Original()
        self._queue: deque[list[Change]] = deque()
        self._armed = False
        self._flushed_at = 0.0

    def follow(self, identity: bytes, send: Send) -> None:
        """Send a frontend a snapshot, and all that follow what is new.

        send: sends a message. It is called on the asyncio thread."""
        self._loop.call_soon_threadsafe(self._follow, identity, send)

    def _take(self, changes: list[Change]) -> None:
        """Queue the changes of a step."""
        if len(self._queue) > _MOST_STEPS:
            logger.error("the asyncio thread hangs: forgetting all cached blocks")
            self._queue.clear()
            changes = [Cleared(), *changes]
        self._queue.append(changes)
        if not self._armed:
            self._armed = True
            self._loop.call_soon_threadsafe(self._arm)

    def status(self) -> dict[str, int]:
        """For /status: cached blocks, and the number of the next event."""
        return {"blocks": len(self._held), "events": self._original.next}

    def _follow(self, identity: bytes, send: Send) -> None:
        self._send = send
        for page in self._original.snapshot():
            send(wire.encode(page), identity)

    def _arm(self) -> None:
        wait = self._flushed_at + _FLUSH_S - self._loop.time()
        self._loop.call_later(max(0.0, wait), self._flush)

    def _flush(self) -> None:
        failpoints.hit("decode.before_events")
        self._armed = False  # before the queue is emptied, so that nothing stays in it
        # A step stores at most the blocks of its tokens, so hashing them takes a millisecond.
        while self._queue:
            for change in self._queue.popleft():
                self._apply(change)
        self._flushed_at = self._loop.time()
        for message in self._original.news():
            if self._send is not None:
                self._send(wire.encode(message), None)

    def _apply(self, change: Change) -> None:
        if isinstance(change, Stored):
            self._original.append(Op.STORE, self._held.store(change))
        elif isinstance(change, Removed):
            self._original.append(Op.REMOVE, self._held.remove(change))
        else:
            self._held.clear()
            self._original.append(Op.CLEAR)
