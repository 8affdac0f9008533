"""Decides whether the prefix of a prompt is read from another decode worker (prefix_fetch.py).

vLLM's scheduler asks about each prompt, with the local hit. The prefix is fetched if the frontend's
hint promises enough tokens beyond the hit, if the rest of the prompt would then be computed here,
and if reading is cheaper than computing. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.fetch_rates import computed_s
from pullfill.decode_worker.prefix_fetch import Answer, Fetch, PrefixFetches, Turn
from pullfill.decode_worker.rules import OF_THE_REQUEST, decide, first
from pullfill.engine.groups import hash_at
from pullfill.engine.request_limits import PREFIX_HOLDER
from pullfill.wire import Adapter, PrefixHolder, RouterPolicy


class FetchChoice:
    """Decides about each prompt, and begins its fetch.

    block_size: tokens of a block. pool: vLLM's BlockPool.
    local_tokens: see `Situation`.
    prefill_s: takes (start, tokens) and returns how long it takes to compute them here. 0: unknown.
    """

    def __init__(
        self,
        context: DecodeContext,
        fetches: PrefixFetches,
        *,
        block_size: int,
        pool: Any,
        local_tokens: int,
        prefill_s: Callable[[int, int], float],
    ) -> None:
        self.fetches = fetches
        self._context = context
        self._block_size = block_size
        self._pool = pool
        self._local_tokens = local_tokens
        self._prefill_s = prefill_s
        # Prompts that wait until another prompt's prefix is fetched: the key of that prefix, and
        # the longest hit with which it is worth waiting. vLLM asks about each of them in each step.
        self._after: dict[str, tuple[object, int]] = {}

    def look(self, request: Any, hit: int) -> int | None:
        """Return how many tokens beyond the local hit will be fetched: 0, or whole blocks.

        None: the holder is being asked, so vLLM must ask again.

        request: vLLM's Request. hit: tokens of the local prefix hit."""
        fetch = self.fetches.known(request.request_id)
        if fetch is None:
            key, most = self._after.get(request.request_id, (None, -1))
            if hit <= most and self.fetches.waits(key):
                return None
            return self._first(request, hit)
        if fetch.turn is not Turn.WAITING:
            return 0
        if self.fetches.pending(fetch):
            return None
        if fetch.answer is Answer.LEASED and hit >= fetch.start:
            tokens = fetch.leased - hit
            if tokens >= fetch.least and self._stays(request, fetch.leased, fetch.adapter):
                return tokens
        self.fetches.drop(fetch)
        return 0

    def begin(self, request_id: str, hit: int, blocks: Sequence[int]) -> None:
        """Copy the KV after the local hit into these blocks, which vLLM has allocated.

        Without blocks, vLLM has declined, and the prompt is computed."""
        if (fetch := self.fetches.known(request_id)) is None:
            return
        if blocks:
            self.fetches.begin(fetch, hit, blocks)
        else:
            self.fetches.drop(fetch)

    def finished(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._after.pop(request_id, None)
        self.fetches.finished(request_id)

    def explain(self, request_id: str) -> None:
        """Note why the prefix of an admitted request is not fetched, if a hint said who has it."""
        self._after.pop(request_id, None)
        if (fetch := self.fetches.known(request_id)) is not None:
            self.fetches.drop(fetch)  # with pipeline parallelism it may still be asked for
            self._context.traces.not_fetched(request_id, fetch.at.instance_id, fetch.outcome)

    def _first(self, request: Any, hit: int) -> int | None:
        config, size = self._context.router_config(), self._block_size
        hint: PrefixHolder | None = (request.kv_transfer_params or {}).get(PREFIX_HOLDER)
        least = config.min_fetch_tokens
        if hint is None or not least or hint.instance_id == self._context.instance_id:
            return 0
        end = min(hint.tokens, request.num_prompt_tokens - self._local_tokens) // size * size
        if end - hit < least or request.mm_features:
            return 0
        # No prefill worker is asked. So it does not matter whether one may load adapters.
        asked = request.lora_request
        adapter = None if asked is None else self._context.adapters.for_others(asked)
        if not self._stays(request, end, adapter):
            return 0
        key = hash_at(self._pool, size, request, end // size - 1)
        if self.fetches.waits(key):
            self._after[request.request_id] = key, end - least
            return None
        fetch = Fetch(
            request.request_id,
            hint,
            request.prompt_token_ids,
            start=hit,
            end=end,
            least=least,
            key=key,
            cache_salt=request.cache_salt,
            adapter=adapter,
        )
        compute_s = computed_s(self._prefill_s(hit, end - hit), end - hit)
        return None if self.fetches.ask(fetch, compute_s) else 0

    def _stays(self, request: Any, hit: int, adapter: Adapter | None) -> bool:
        """Whether others can have the KV, and the rest would be computed here, with this hit."""
        now = replace(self._context.situation(request, hit), adapter=adapter)
        if first(OF_THE_REQUEST, request, now) or now.config.policy is RouterPolicy.ALWAYS_REMOTE:
            return False
        if now.config.policy is RouterPolicy.COST:
            return not now.long
        return not decide(request, now).remote
