"""Chooses the decode worker of each request, and counts what is sent to whom.

`Dispatcher` calls `choose` and `sent` when it sends a request, then `first` and `left`. The policy
is `router.decode_policy`; `choice` says what the policies do.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from pullfill.engine import migration
from pullfill.frontend import counters
from pullfill.frontend.decode_connection import DecodeConnection
from pullfill.frontend.flight import Flight, Hashed
from pullfill.frontend.routing.choice import KNOWN, Candidates, Placer, WorkerChoice
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.prefix import chain
from pullfill.prefix.events import State
from pullfill.wire import DecodeChoice, DecodePolicy, PrefixHolder

# For how many answers with several choices the worker is remembered.
MAX_TOGETHER = 1024


class Balancer:
    """Owned by the `Dispatcher`, on its event loop. Never blocks.

    policy: returns the policy to use now.
    prefixes: which worker holds which blocks. None: unknown.
    frontends: returns how many frontends serve the same workers.
    min_fetch: returns `router.min_fetch_tokens`.

    All choices of one answer (`n` > 1) go to one worker. So a prompt that kills workers kills only
    one at a time, and its prefix is computed once."""

    def __init__(
        self,
        policy: Callable[[], DecodePolicy],
        prefixes: Prefixes | None = None,
        frontends: Callable[[], int] = lambda: 1,
        min_fetch: Callable[[], int] = lambda: 0,
    ) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._frontends = frontends
        self._min_fetch = min_fetch
        self._placement = Placer(random.Random())
        self._together: dict[str, str] = {}
        self._workers: Sequence[DecodeConnection] = ()
        self._by_id: dict[str, DecodeConnection] = {}
        self._among: Candidates
        self._block = 0
        self._warm = False
        self._look_at = 0.0

    # ---------------------------------------------------------------- requests

    def choose(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float
    ) -> DecodeConnection:
        """Return one of `workers`, which is not empty. now: seconds of the loop's clock."""
        request = flight.request
        several = migration.choice_of(request.request_id, request.external_req_id)
        answer = request.external_req_id if several else ""
        if not answer:
            return self._choose(flight, workers, now)
        before = self._together.pop(answer, None)
        chosen = next((w for w in workers if w.instance_id == before), None)
        if chosen is None:
            chosen = self._choose(flight, workers, now)
        else:
            view = self._placement.fleet.join(chosen.instance_id)
            flight.choice = self._place(flight, Candidates.of([view]), now)
            flight.choice.reason = "together"
        self._together[answer] = chosen.instance_id
        if len(self._together) > MAX_TOGETHER:
            del self._together[next(iter(self._together))]
        return chosen

    def holder(self, flight: Flight, worker: DecodeConnection) -> PrefixHolder | None:
        """Return another worker that holds more of the prompt than the chosen one, if any.

        It may drain: then its requests move, and its blocks are worth reading while it is there."""
        least = self._min_fetch()
        if not least or self._prefixes is None or not self._block or self._prefixes.workers < 2:
            return None
        if _length(flight) <= least or (hashes := self._hashed(flight).hashes) is None:
            return None
        held = self._prefixes.matched(hashes).blocks
        if worker.instance_id not in held and len(held) == KNOWN:
            held = self._prefixes.matched(hashes, sys.maxsize).blocks
        own = held.pop(worker.instance_id, 0)
        if not held:
            return None
        best = max(held, key=lambda name: held[name])
        address = self._prefixes.control(best)
        if not address or (held[best] - own) * self._block < least:
            return None
        return PrefixHolder(instance_id=best, control=address, tokens=held[best] * self._block)

    def sent(self, flight: Flight, worker: DecodeConnection, now: float) -> None:
        """Count a request that goes to the worker which `choose` has chosen."""
        choice = flight.choice
        assert choice is not None
        hashed = self._hashed(flight) if choice.policy is DecodePolicy.KV else _NOT_HASHED
        flight.share = self._placement.send(
            choice, _length(flight), now, block=self._block, hashes=hashed.hashes
        )
        flight.counted = len(flight.tokens)
        counters.DECODE_CHOICE.labels(choice.policy, choice.reason).inc()
        score = None if choice.score is None else round(choice.score, 1)
        flight.record.decode_choice = DecodeChoice(
            policy=choice.policy,
            matched_tokens=choice.matched_tokens,
            score=score,
            reason=choice.reason,
        )
        flight.choice = None

    def first(self, flight: Flight) -> None:
        """The first output of the request has come: its prompt is computed."""
        if flight.share is not None:
            flight.share.first()

    def left(self, flight: Flight) -> None:
        """The request has ended or leaves its worker. May be called again without effect."""
        if flight.share is not None:
            flight.share.end(len(flight.tokens) - flight.counted)
            flight.share = None

    # ---------------------------------------------------------------- workers

    def report(self, worker: DecodeConnection) -> None:
        """Take what a worker has said about its load."""
        if worker.load is not None:
            fleet, load = self._placement.fleet, worker.load
            fleet.join(worker.instance_id)
            fleet.report(
                worker.instance_id,
                load.uncached_tokens_queued,
                load.active_blocks,
                load.free_blocks,
            )

    def lost(self, worker: DecodeConnection) -> None:
        """Forget a worker. It may come back under the same name, with an empty cache."""
        self._placement.drop(worker.instance_id)
        self._workers = ()

    # ---------------------------------------------------------------- inside

    def _choose(
        self, flight: Flight, workers: Sequence[DecodeConnection], now: float
    ) -> DecodeConnection:
        if workers is not self._workers:  # the pool makes a new list when anything changes
            self._workers = workers
            self._by_id = {worker.instance_id: worker for worker in workers}
            self._among = self._placement.candidates(list(self._by_id))
            self._look_at = 0.0
        if now >= self._look_at:
            self._look(now)
        flight.choice = self._place(flight, self._among, now)
        return self._by_id[flight.choice.view.instance_id]

    def _place(self, flight: Flight, among: Candidates, now: float) -> WorkerChoice:
        policy = self._policy()
        hashed = self._hashed(flight) if policy is DecodePolicy.KV else _NOT_HASHED
        stored = None
        if self._prefixes is not None and hashed.hashes is not None:
            stored = self._prefixes.matched(hashed.hashes)
            stored.only(among.by_id)
        return self._placement.choose(
            policy,
            _length(flight),
            among,
            now,
            block=self._block,
            hashes=hashed.hashes,
            stored=stored,
            warm=self._warm,
        )

    def _look(self, now: float) -> None:
        """Find the block size, whether the index is warm, and the number of frontends."""
        self._look_at = now + 0.25
        self._placement.chooser.peers = max(1, self._frontends())
        sizes = {w.instance_id: w.welcome.prefix_block_size for w in self._workers if w.welcome}
        cached = [name for name, size in sizes.items() if size]
        # Workers of one model have blocks of one size. Others match nothing: their hashes differ.
        self._block = sizes[cached[0]] if cached else 0
        if self._prefixes is None:
            self._warm = False
            return
        known = sum(self._prefixes.state(name) in (State.WARM, State.BEHIND) for name in cached)
        self._warm = 2 * known >= len(cached)

    def _hashed(self, flight: Flight) -> Hashed:
        """The hashes of the prompt, which are computed once."""
        length, hashed = _length(flight), flight.hashed
        if hashed is None or hashed.block != self._block or hashed.tokens != length:
            hashes = hashes_of(flight.request, flight.tokens, self._block) if self._block else None
            hashed = flight.hashed = Hashed(self._block, length, hashes)
        return hashed


_NOT_HASHED = Hashed(0, 0, None)


def _length(flight: Flight) -> int:
    return len(flight.request.prompt_token_ids or ()) + len(flight.tokens)


def hashes_of(request: Any, tokens: Sequence[int], block: int) -> list[int] | None:
    """The chain hashes of the blocks of a prompt, and of the tokens that are out already.

    Of a prompt with images only the blocks before the first one: what follows depends on their
    content. None: there are no token ids, or the request does not read the prefix cache."""
    ids = request.prompt_token_ids
    params = request.sampling_params
    if not ids or request.prompt_embeds is not None:
        return None
    if params is not None and params.skip_reading_prefix_cache:
        return None
    if request.mm_features:
        ids = ids[: min(feature.mm_position.offset for feature in request.mm_features)]
    elif tokens:
        ids = [*ids, *tokens]
    adapter = request.lora_request
    lora = adapter.lora_name if adapter is not None else None
    root = chain.root(request.cache_salt or None, lora, block)
    return chain.extend(root, array("I", ids).tobytes(), block)
