"""Chooses the decode worker of each request, and counts what is sent to whom.

`Dispatcher` calls `choose` when it sends a request, and `left` when it is there no longer. The
policy is `router.decode_policy`; `choice` says what the policies do.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pullfill.engine import migration
from pullfill.engine.front_wire import LoadReport
from pullfill.frontend import counters
from pullfill.frontend.decode_connection import DecodeConnection
from pullfill.frontend.flight import Flight
from pullfill.frontend.routing.choice import BY_PREFIX, KNOWN, MOVE_S, Placer, Prompt
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.prefix import chain
from pullfill.wire import DecodePolicy, PrefixHolder, RouterConfig

# For how many answers with several choices the worker is remembered.
MAX_TOGETHER = 1024


@dataclass(eq=False)
class Balancer:
    """Owned by the `Dispatcher`, on its event loop. Never blocks.

    config: returns the router's settings.
    prefixes: which worker holds which blocks.
    placer: its `peers` are set by the pool."""

    config: Callable[[], RouterConfig]
    prefixes: Prefixes = field(default_factory=lambda: Prefixes(0))
    placer: Placer = field(default_factory=lambda: Placer(random.Random()))
    # The worker of each answer with several choices.
    _together: dict[str, str] = field(default_factory=dict)
    _block: int = 0
    _even_until: float = 0.0

    def choose(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float
    ) -> DecodeConnection:
        """Return one of `workers`, which is not empty, and count the request there.

        now: seconds of the loop's clock."""
        sizes = (worker.welcome.prefix_block_size for worker in workers if worker.welcome)
        # Workers of one model have blocks of one size. Others match nothing: their hashes differ.
        self._block = next(filter(None, sizes), 0)
        by_id = {worker.instance_id: worker for worker in workers}
        request = flight.request
        # All choices of one answer (`n` > 1) go to one worker. So a prompt that kills workers kills
        # only one at a time, and its prefix is computed once.
        several = migration.choice_of(request.request_id, request.external_req_id)
        before = self._together.pop(request.external_req_id, "") if several else ""
        names = [before] if before in by_id else by_id
        policy = self.config().decode_policy
        by_prefix = policy in BY_PREFIX  # else nothing is hashed
        prompt = self._hashed(flight) if by_prefix else Prompt(_length(flight), self._block)
        held, more = self.prefixes.index.deepest(prompt.hashes, KNOWN)
        view, told = self.placer.choose(policy, prompt, names, now, held, more)
        name = view.instance_id
        if before == name:
            told = replace(told, reason="together")
        if several:
            self._together[request.external_req_id] = name
            if len(self._together) > MAX_TOGETHER:
                del self._together[next(iter(self._together))]
        flight.share = self.placer.send(view, told.matched_tokens, prompt, now)
        flight.record.decode_choice = told
        counters.DECODE_CHOICE.labels(told.policy, told.reason).inc()
        return by_id[name]

    def holder(self, flight: Flight, worker: DecodeConnection) -> PrefixHolder | None:
        """Return another worker that holds more of the prompt than the chosen one, if any."""
        least = self.config().min_fetch_tokens
        if not least or not self._block or len(self.placer.views) < 2:
            return None
        if _length(flight) <= least or not (hashes := self._hashed(flight).hashes):
            return None
        held = self.prefixes.index.deepest(hashes, KNOWN)[0]
        if worker.instance_id not in held and len(held) == KNOWN:
            held = self.prefixes.index.match(hashes)
        own = held.pop(worker.instance_id, 0)
        if not held:
            return None
        # It may drain: then its requests move, and its blocks are worth reading while it is there.
        best = max(held, key=lambda name: held[name])
        address = self.prefixes.control(best)
        if not address or (held[best] - own) * self._block < least:
            return None
        return PrefixHolder(instance_id=best, control=address, tokens=held[best] * self._block)

    def left(self, flight: Flight) -> None:
        """The request has ended or leaves its worker. May be called again without effect."""
        if flight.share is not None:
            flight.share.end(len(flight.tokens) - flight.record.migrated_tokens)

    def report(
        self, instance_id: str, load: LoadReport, workers: Sequence[DecodeConnection], now: float
    ) -> tuple[DecodeConnection, DecodeConnection] | None:
        """Take what a worker has said about its load. now: as for `choose`.

        workers: all that take requests. Returns which of them has a stream too many, and which
        shall have it, if any."""
        view = self.placer.report(
            instance_id, load.uncached_tokens_queued, load.active_blocks, load.free_blocks
        )
        view.told, view.told_at = load, now
        # All workers are looked at, so not with each report: each worker sends 20 in a second.
        if now < self._even_until or self.config().decode_policy is not DecodePolicy.PACK:
            return None
        self._even_until = now + MOVE_S
        by_id = {worker.instance_id: worker for worker in workers}
        if (found := self.placer.uneven(by_id, now)) is None:
            return None
        return by_id[found[0]], by_id[found[1]]

    def _hashed(self, flight: Flight) -> Prompt:
        """The prompt with its hashes, which are computed once."""
        length, hashed = _length(flight), flight.hashed
        if hashed is None or hashed.block != self._block or hashed.tokens != length:
            hashes = hashes_of(flight.request, flight.tokens, self._block) if self._block else ()
            hashed = flight.hashed = Prompt(length, self._block, hashes)
        return hashed


def _length(flight: Flight) -> int:
    return len(flight.request.prompt_token_ids or ()) + len(flight.tokens)


def hashes_of(request: Any, tokens: Sequence[int], block: int) -> list[int]:
    """The chain hashes of the blocks of a prompt, and of the tokens that are out already.

    Of a prompt with images only the blocks before the first one: what follows depends on their
    content. Empty: there are no token ids, or the request does not read the prefix cache."""
    ids = request.prompt_token_ids
    if not ids or request.prompt_embeds is not None:
        return []
    if request.sampling_params.skip_reading_prefix_cache:
        return []
    if request.mm_features:
        ids = ids[: min(feature.mm_position.offset for feature in request.mm_features)]
    elif tokens:
        ids = [*ids, *tokens]
    adapter = request.lora_request
    lora = adapter.lora_name if adapter is not None else None
    root = chain.root(request.cache_salt or None, lora, block)
    return chain.extend(root, array("I", ids).tobytes(), block)
