"""Fetches prefixes: reads what another decode worker has cached, instead of computing it again.

A frontend's hint says who holds more of a prompt than this worker (wire.PrefixHolder). One fetch:

    engine thread   `look`: if the prompt stays here, ask for a lease. vLLM must ask again until the
                    answer is there. Then so many tokens will be loaded
    asyncio         how many blocks the holder really has, pinned there
    engine thread   `begin`: vLLM has allocated blocks
    reader thread   copies into those blocks, under the lease's fence
    asyncio         the lease is given back. Only if it was valid until then, the copy counts
    engine thread   `take`: loaded, or failed. After a failure the prompt is computed
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pullfill.decode_worker.context import DecodeContext
from pullfill.decode_worker.forecast import ASSUMED_TOKENS_PER_S
from pullfill.decode_worker.prefix.holders import AGAIN_S, Holder, Holders, LeaseRefused
from pullfill.decode_worker.rules import OF_THE_REQUEST, Situation, decide, first
from pullfill.engine.groups import hash_at
from pullfill.engine.request_limits import PREFIX_HOLDER
from pullfill.errors import Fenced, IncompatibleError, PullfillError
from pullfill.net.peer_link import NotInTime
from pullfill.runtime import log, metrics
from pullfill.runtime.lifecycle import Tasks
from pullfill.wire import (
    Adapter,
    Lease,
    LeaseAsk,
    PrefixHolder,
    RouterPolicy,
    u32,
)

logger = log.get("decode_worker.fetch")

# Fetches of this worker at a time.
MOST = 32
# A copy may take so many times as long as the computation: it costs the engine no time.
_TIMES = 2.0
# Least and most time for the copy. The most is shorter than a lease (read_leases.LEASE_S).
_COPY_S = (1.0, 8.0)


class FetchOutcome(enum.StrEnum):
    """What came of a hint. With all but FETCHED the prefix was computed."""

    FETCHED = "fetched"
    # This worker or the holder had too many such reads, or a step of the holder still ran.
    BUSY = "busy"
    # The holder has too little of the prefix (any more).
    NOT_HELD = "not_held"
    # The holder could not be asked, did not answer in time, or may not be read.
    UNREACHABLE = "unreachable"
    # The copy broke off: the holder died, or was too slow.
    LOST = "lost"
    # The lease ended before the copy was confirmed: it took too long, or vLLM had no blocks.
    EXPIRED = "expired"
    # The request ended, or went another way.
    CANCELLED = "cancelled"


class FetchTurn(enum.Enum):
    """How far a fetch is for the engine thread.

    WAITING: `begin` was not called. COPYING: it was, and `take` has not returned the fetch."""

    WAITING = 1
    COPYING = 2
    OVER = 3


@dataclass(slots=True, eq=False)
class Fetch:
    """One prompt's fetch. Lengths are in tokens, whole blocks."""

    request_id: str
    at: PrefixHolder  # the holder
    prompt: Sequence[int]
    # start, end: the lease is asked for the tokens from `start` to `end`.
    start: int
    end: int
    least: int  # fewer tokens are not fetched
    key: object  # vLLM's hash of the tokens up to `end`
    cache_salt: str | None
    adapter: Adapter | None
    within_s: float  # most seconds for the connection, and again for the answer
    copy_s: float  # most seconds for the copy
    blocks: asyncio.Future[Sequence[int]]  # has a result once `begin` was called
    # Written by the engine thread.
    turn: FetchTurn = FetchTurn.WAITING
    wanted: bool = True  # false once the request has ended or goes another way
    begin_at: int = 0  # where the copy begins, which is the end of the local hit
    answer_by: float = 0.0  # when the prompt is computed if the holder is still being asked
    # Written by the asyncio thread.
    leased: int = 0  # the end of the lease. 0: the holder has given none, or not answered yet
    outcome: FetchOutcome = FetchOutcome.CANCELLED
    seconds: float = 0.0  # how long the read has taken
    kv_bytes: int = 0  # of the copy, as the transport is
    transport: str = ""
    ended: bool = False  # nothing is asked for or copied any more

    @property
    def going(self) -> bool:
        """Whether its prefix may still be loaded. Engine thread."""
        return self.turn is FetchTurn.COPYING or (self.turn is FetchTurn.WAITING and not self.ended)


@dataclass(eq=False, repr=False)
class PrefixFetches:
    """Decides which prefixes are fetched, and fetches them.

    What always holds:

    - After `begin` a request waits until `take` has returned it, exactly once. Only then vLLM may
      reuse its blocks, and then no thread copies into them: a cancelled request waits for that too.
    - A fetch is tried once for a request. It has a deadline in each phase, so a holder that is
      stopped delays one prompt by a few seconds. Afterwards it is not asked for a while.
    - If two prompts want the same prefix, the second one waits for the first, and then has a hit.
    """

    context: DecodeContext
    holders: Holders
    # Takes a request and its hit, and returns everything that a rule may look at.
    situation: Callable[[Any, int], Situation]
    # Takes (start, tokens) and returns how long it takes to compute them here. 0: unknown.
    prefill_s: Callable[[int, int], float]
    wake: Callable[[], None]  # wakes the engine thread
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _open: dict[str, Fetch] = field(init=False, default_factory=dict)
    # Those of `_open` that were going at the last look. Engine thread. `_running` lags behind: one
    # look of vLLM at its queue asks about many prompts.
    _going: list[Fetch] = field(init=False, default_factory=list)
    _events: deque[Fetch] = field(init=False, default_factory=deque)
    # Never cancelled: the end of one says that no thread touches the blocks.
    _running: Tasks = field(init=False, default_factory=Tasks)

    # ------------------------------------------------------------------ engine thread

    @property
    def has_events(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._events)

    def look(self, request: Any, hit: int) -> int | None:
        """Return how many tokens beyond the local hit will be fetched: 0, or whole blocks.

        None: the holder is being asked, so vLLM must ask again.

        request: vLLM's Request. hit: tokens of the local prefix hit."""
        fetch = self._open.get(request.request_id)
        if fetch is None:
            return self._first(request, hit)
        if fetch.turn is not FetchTurn.WAITING:
            return 0
        if not (fetch.leased or fetch.ended) and time.monotonic() < fetch.answer_by:
            return None
        if fetch.leased and not fetch.ended and hit >= fetch.start:
            tokens = fetch.leased - hit
            if tokens >= fetch.least and self._stays(request, fetch.leased, fetch.adapter):
                return tokens
        self._drop(fetch)
        return 0

    def begin(self, request_id: str, hit: int, blocks: Sequence[int]) -> None:
        """Copy the KV after the local hit into these blocks, which vLLM has allocated.

        Without blocks, vLLM has declined, and the prompt is computed."""
        if (fetch := self._open.get(request_id)) is None:
            return
        if not blocks:
            self._drop(fetch)
            return
        fetch.turn, fetch.begin_at = FetchTurn.COPYING, hit
        self._loop.call_soon_threadsafe(self._go, fetch, list(blocks))

    def explain(self, request_id: str) -> None:
        """Note why the prefix of an admitted request is not fetched, if a hint said who has it."""
        if (fetch := self._open.get(request_id)) is not None:
            self._drop(fetch)  # with pipeline parallelism it may still be asked for
            self.context.traces.not_fetched(request_id, fetch.at.instance_id, fetch.outcome)

    def finished(self, request_id: str) -> None:
        """The request is over in vLLM. If it is being fetched, `take` still returns it."""
        if (fetch := self._open.get(request_id)) is None:
            return
        self._drop(fetch)
        fetch.wanted = False
        if fetch.turn is FetchTurn.OVER:
            del self._open[request_id]

    def take(self) -> list[Fetch]:
        """Return the fetches that were begun and have ended."""
        taken = []
        while self._events:
            fetch = self._events.popleft()
            fetch.turn = FetchTurn.OVER
            if not fetch.wanted:
                del self._open[fetch.request_id]
            taken.append(fetch)
        return taken

    def _first(self, request: Any, hit: int) -> int | None:
        """Look at a request for the first time: begin a fetch, if its holder may be asked."""
        config, blocks = self.context.router_config(), self.context.blocks
        size = blocks.block_size
        hint: PrefixHolder | None = (request.kv_transfer_params or {}).get(PREFIX_HOLDER)
        least = config.min_fetch_tokens
        if hint is None or not least or hint.instance_id == self.context.worker.instance_id:
            return 0
        end = min(hint.tokens, request.num_prompt_tokens - blocks.local_tokens) // size * size
        if end - hit < least or request.mm_features:
            return 0
        # No prefill worker is asked. So it does not matter whether one may load adapters.
        asked = request.lora_request
        adapter = None if asked is None else self.context.worker.adapters.for_others(asked)
        if not self._stays(request, end, adapter):
            return 0
        key = hash_at(blocks.pool, size, request, end // size - 1)
        self._going = [fetch for fetch in self._going if fetch.going]
        # Without this, a burst of prompts with one system prompt would read it once for each, into
        # blocks of its own each time. vLLM finds no hit in blocks that are still copied.
        if any(fetch.key == key for fetch in self._going):
            return None
        compute_s = self.prefill_s(hit, end - hit) or (end - hit) / ASSUMED_TOKENS_PER_S
        fetch = self._open[request.request_id] = Fetch(
            request.request_id,
            hint,
            request.prompt_token_ids,
            start=hit,
            end=end,
            least=least,
            key=key,
            cache_salt=request.cache_salt,
            adapter=adapter,
            within_s=min(max(compute_s / 2, AGAIN_S / 2), AGAIN_S),
            copy_s=min(max(_TIMES * compute_s, _COPY_S[0]), _COPY_S[1]),
            blocks=self._loop.create_future(),
        )
        away = self.holders.away(hint.instance_id)
        if away or len(self._going) >= MOST:
            fetch.turn, fetch.ended = FetchTurn.OVER, True
            fetch.outcome = FetchOutcome.UNREACHABLE if away else FetchOutcome.BUSY
            metrics.PREFIX_FETCH.labels(fetch.outcome.value).inc()
            return 0
        self._going.append(fetch)
        fetch.answer_by = time.monotonic() + 2 * fetch.within_s + 1.0
        self._loop.call_soon_threadsafe(self._start, fetch)
        return None

    def _stays(self, request: Any, hit: int, adapter: Adapter | None) -> bool:
        """Whether others can have the KV, and the rest would be computed here, with this hit."""
        now = replace(self.situation(request, hit), adapter=adapter)
        if first(OF_THE_REQUEST, request, now) or now.config.policy is RouterPolicy.ALWAYS_REMOTE:
            return False
        if now.config.policy is RouterPolicy.COST:
            return not now.long
        return not decide(request, now).remote

    def _drop(self, fetch: Fetch) -> None:
        """Let the prompt be computed. Without effect after `begin`."""
        if fetch.turn is FetchTurn.WAITING:
            fetch.turn, fetch.wanted = FetchTurn.OVER, False
            if not fetch.ended:
                self._loop.call_soon_threadsafe(fetch.blocks.cancel)

    # ------------------------------------------------------------------ asyncio thread

    async def close(self) -> None:
        """End all fetches. Afterwards nothing is copied."""
        await self.holders.close()
        for fetch in list(self._open.values()):
            fetch.blocks.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_COPY_S[1])

    def _start(self, fetch: Fetch) -> None:
        self._running.begin(self._run(fetch), "fetch a prefix")

    def _go(self, fetch: Fetch, blocks: list[int]) -> None:
        if fetch.ended:  # the lease was given back while vLLM allocated
            self._tell(fetch)
        elif fetch.blocks.cancelled():  # by `close`: it ends in a moment
            self._loop.call_soon(self._go, fetch, blocks)
        else:
            fetch.blocks.set_result(blocks)

    def _tell(self, fetch: Fetch) -> None:
        self._events.append(fetch)
        self.wake()

    async def _run(self, fetch: Fetch) -> None:
        holder: Holder | None = None
        lease: Lease | None = None
        began = first = time.monotonic()
        try:
            async with asyncio.timeout(fetch.within_s):
                holder = await self.holders.use(fetch.at)
            began = time.monotonic()
            lease = await holder.lease(
                lambda rid: LeaseAsk(
                    rid=rid,
                    token_ids=u32.pack(fetch.prompt[: fetch.end]),
                    start=fetch.start,
                    cache_salt=fetch.cache_salt,
                    adapter=fetch.adapter,
                ),
                fetch.within_s,
            )
            asked_s = time.monotonic() - began
            if not self._leased(fetch, lease):
                return
            blocks = await self._turn(fetch, lease)
            if blocks is None:
                return
            began = time.monotonic()
            await self._copy(fetch, holder, lease, blocks)
            lease = None  # `_copy` has given it back
            fetch.seconds = asked_s + time.monotonic() - began
        except LeaseRefused as exc:
            known = exc.reason in (FetchOutcome.BUSY, FetchOutcome.NOT_HELD)
            fetch.outcome = FetchOutcome(exc.reason) if known else FetchOutcome.UNREACHABLE
        except Fenced:  # the lease had ended before the copy
            fetch.outcome = FetchOutcome.EXPIRED
        except (PullfillError, TimeoutError, RuntimeError) as exc:
            self._failed(fetch, exc)
        except Exception as exc:
            about = log.ids(request_id=fetch.request_id)
            logger.exception("fetching the prefix of %s failed", fetch.request_id, extra=about)
            self._failed(fetch, exc)
        finally:
            if lease is not None and holder is not None:
                holder.forget(lease)
            fetch.seconds = fetch.seconds or time.monotonic() - first
            self._end(fetch)

    def _leased(self, fetch: Fetch, lease: Lease) -> bool:
        """Note what is leased. Returns whether it is enough."""
        blocks = len(lease.block_ids) // u32.SIZE
        end = min(fetch.start + blocks * self.context.blocks.block_size, fetch.end)
        if end - fetch.start < fetch.least:
            fetch.outcome = FetchOutcome.NOT_HELD
            return False
        fetch.leased = end
        self.wake()
        return True

    async def _turn(self, fetch: Fetch, lease: Lease) -> Sequence[int] | None:
        """Wait for our blocks. None: they are not wanted, or did not come in time."""
        # Half of the lease's time is for vLLM to allocate them, and half for the copy.
        await asyncio.wait([fetch.blocks], timeout=max(0.0, lease.within_s / 2))
        if not fetch.blocks.done() or fetch.blocks.cancelled():
            gone = fetch.blocks.cancelled()
            fetch.outcome = FetchOutcome.CANCELLED if gone else FetchOutcome.EXPIRED
            return None
        return fetch.blocks.result()

    async def _copy(
        self, fetch: Fetch, holder: Holder, lease: Lease, blocks: Sequence[int]
    ) -> None:
        """Copy, and have the holder confirm that the lease was valid until the end."""
        first = (fetch.begin_at - fetch.start) // self.context.blocks.block_size
        source = u32.unpack(lease.block_ids)[first : first + len(blocks)]
        fetch.kv_bytes, _, fetch.transport = await holder.read(
            lease, source, blocks, lambda: fetch.wanted, fetch.copy_s
        )
        valid = await holder.end_lease(lease)
        fetch.outcome = FetchOutcome.FETCHED if valid else FetchOutcome.EXPIRED

    def _failed(self, fetch: Fetch, exc: Exception) -> None:
        if not fetch.wanted:
            fetch.outcome = FetchOutcome.CANCELLED
            return
        fetch.outcome = FetchOutcome.LOST if fetch.leased else FetchOutcome.UNREACHABLE
        log_it = logger.info if isinstance(exc, IncompatibleError) else logger.warning
        log_it("prefix of %s is not read from %s: %s", fetch.request_id, fetch.at.instance_id, exc)
        if isinstance(exc, NotInTime) and not fetch.leased:  # e.g. in a long step of its engine
            self.holders.pause(fetch.at.instance_id, AGAIN_S)
        else:
            self.holders.failed(fetch.at.instance_id)

    def _end(self, fetch: Fetch) -> None:
        fetch.ended = True
        metrics.PREFIX_FETCH.labels(fetch.outcome.value).inc()
        if fetch.blocks.done() and not fetch.blocks.cancelled():
            self._tell(fetch)
        else:
            self.wake()  # so that vLLM asks again
