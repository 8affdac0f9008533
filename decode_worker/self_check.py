"""The self-check: kinds of workers that meet for the first time compare a remote prefill with a
local one.

    a worker joins as `checking` → one prompt of random tokens is prefilled here, and by the prefill
    worker → KV and log probabilities are compared → the result is kept in etcd → it is `ready`

A prefill worker follows the results (prefill_worker/decode_links.py). Until it has passed
with the kind of a decode worker, it takes none of that worker's jobs. Claims and commits know
nothing of it. A comparison that could not be made is made again. Only values that differ fail.

asyncio thread only, except where a method says otherwise.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.backoff import Backoff
from pullfill.decode_worker import difference
from pullfill.decode_worker.peers import Peer
from pullfill.decode_worker.rules import SELF_CHECK_FAILED as FAILED
from pullfill.decode_worker.rules import SELF_CHECK_PENDING as PENDING
from pullfill.decode_worker.rules import Decision
from pullfill.engine import requests
from pullfill.engine.compat import dtype_of_kv, rounding_digest
from pullfill.engine.groups import Groups
from pullfill.errors import HandoffError, RegistryUnavailable
from pullfill.ids import new_job_id
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import Directory
from pullfill.registry.self_checks import SelfChecks, pair_of
from pullfill.runtime import log, metrics
from pullfill.runtime.lifecycle import Tasks, end
from pullfill.transfer.copying import copies_of, read_pages
from pullfill.wire import Compat, SelfCheck, WorkerRecord, WorkerState

if TYPE_CHECKING:
    from pullfill.decode_worker.context import DecodeContext
    from pullfill.decode_worker.difference import Pages
    from pullfill.transfer.contract import LocalMemory
    from pullfill.worker.engine_loop import EngineLoop

logger = log.get("decode_worker.self_check")

BLOCKS, TOKENS = (2, 4), 256
"""Length of the compared prompt: the least and the most blocks, and tokens that it should not
exceed. Most of a comparison's time is the computation of these tokens."""
LONGEST_S = 30.0
"""A comparison that takes longer is repeated. A decode worker waits for no more than this time to
be compared: then it serves, and prefills every prompt itself."""


@dataclass(eq=False, repr=False)
class Checks:
    """The self-checks of this decode worker with all kinds of prefill workers.

    joining: whether this worker is `checking`."""

    instance_id: str
    compat: Compat
    computes: str  # see `WorkerRecord`
    blocks: int  # length of the compared prompt
    vocabulary: int
    kv_dtype: str
    trials: Trials  # the requests of the comparisons
    kept: SelfChecks  # all results
    joining: bool = field(init=False, default=True)
    _peers: dict[str, tuple[Peer, str]] = field(init=False, default_factory=dict)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _tasks: Tasks = field(init=False, default_factory=Tasks)

    def __post_init__(self) -> None:
        self._tasks.begin(self._run(), "self-checks")

    async def close(self) -> None:
        """Cancel the comparison under way."""
        await end(*self._tasks)

    def met(self, peer: Peer) -> None:
        """Note a prefill worker that has connected."""
        if pair := self._pair(peer.hello.computes):
            self._peers[peer.name] = peer, pair
            self._changed.set()

    def lost(self, peer: Peer) -> None:
        """Note that its connection has ended."""
        self._peers.pop(peer.name, None)

    def _pair(self, prefill_computes: str) -> str:
        return pair_of(self.compat.hash(), self.computes, prefill_computes)

    # ------------------------------------------------------------------ while this worker joins

    def join(self, etcd: EtcdClient, namespace: str, note: Callable[[], None]) -> None:
        """Be `checking` until each kind of prefill worker in the registry has a result. Not for
        longer than LONGEST_S.

        Call it once this worker is registered. Of two workers that join at the same moment, at
        least one then sees the other.

        note: called when this worker is not `checking` any more."""
        self._tasks.begin(self._join(etcd, namespace, note), "self-checks of the registry")

    async def _join(self, etcd: EtcdClient, namespace: str, note: Callable[[], None]) -> None:
        directory, changed = Directory(etcd, namespace, ["prefill"]), asyncio.Event()
        directory.subscribe(lambda _old, _new: changed.set())
        unsubscribe = self.kept.subscribe(changed.set)
        try:
            async with asyncio.timeout(LONGEST_S):
                await directory.start(LONGEST_S)
                while any(map(self._unknown, directory.workers("prefill").values())):
                    changed.clear()
                    await changed.wait()
        except (TimeoutError, RegistryUnavailable) as exc:
            logger.debug("serving before all kinds of prefill workers are compared: %s", exc)
        except Exception:  # routers would never see a worker that stays `checking`
            logger.exception("the registry could not be looked at")
        finally:
            unsubscribe()
            await directory.close()
        self.joining = False
        note()

    def _unknown(self, record: WorkerRecord) -> bool:
        """Whether a prefill worker will meet this one, and its kind has no result."""
        return (
            record.state is not WorkerState.DRAINING
            and record.instance_id != self.instance_id
            and record.compat == self.compat
            and bool(pair := self._pair(record.computes))
            and pair not in self.kept.current
        )

    # ------------------------------------------------------------------ what is told

    @property
    def reason(self) -> str:
        """Why no connected prefill worker brings KV. Empty: the self-check is not why.

        Any thread."""
        results = [self.kept.current.get(pair) for _, pair in list(self._peers.values())]
        if not results or any(result is not None and result.passed for result in results):
            return ""
        return PENDING if None in results else FAILED

    def told(self) -> dict[str, object]:
        """The state of the self-checks, for /status."""
        return {
            "self_check": self.reason or "passed",
            "self_checks": [
                {
                    "prefill_instance": peer.instance_id,
                    "pair": pair,
                    "result": "pending" if result is None else result.word,
                    "advice": None
                    if result is None or result.passed
                    else result.advice(peer.instance_id, self.instance_id),
                }
                for peer, pair in self._peers.values()
                for result in [self.kept.current.get(pair)]
            ],
        }

    # ------------------------------------------------------------------ comparisons

    async def _run(self) -> None:
        """Compare with one prefill worker of each kind without a result, one after another.

        Each try is with another worker of the kind: one may be out of reach, or stand still."""
        tries = Counter[str]()
        pauses = Backoff(0.5, LONGEST_S)
        unsubscribe = self.kept.subscribe(self._changed.set)
        try:
            while True:
                self._changed.clear()
                peers = [
                    peer
                    for peer, pair in self._peers.values()
                    # One that drains takes no job any more.
                    if pair not in self.kept.current and not peer.leaving
                ]
                if not peers:
                    await self._changed.wait()
                    pauses.reset()
                    continue
                peer = min(peers, key=lambda one: tries[one.instance_id])
                tries[peer.instance_id] += 1
                if not await self._compared(peer):
                    metrics.SELF_CHECK.labels("incomplete").inc()
                    with suppress(TimeoutError):  # a worker that has just come is tried at once
                        async with asyncio.timeout(pauses.next()):
                            await self._changed.wait()
        finally:
            unsubscribe()

    async def _compared(self, peer: Peer) -> bool:
        """Compare, and keep the result. Returns whether there is one."""
        try:
            async with asyncio.timeout(LONGEST_S):
                started = time.monotonic()
                result, local_s = await self._compare(peer)
                took_ms = (time.monotonic() - started) * 1e3
        except (Incomplete, TimeoutError) as exc:
            why = str(exc) or f"no answer in {LONGEST_S:.0f} s"
            logger.info("self-check with %s: %s; trying again", peer.instance_id, why)
            return False
        except Exception:
            logger.exception("self-check with %s failed; trying again", peer.instance_id)
            return False
        metrics.SELF_CHECK.labels(result.word).inc()
        if result.passed:
            logger.info(
                "self-check with %s passed in %.0f ms, a local prefill took %.0f: %s",
                peer.instance_id, took_ms, local_s * 1e3, result.in_words(),
            )  # fmt: skip
        else:
            logger.error("%s (found in %.0f ms)", result.advice(), took_ms)
        self.kept.keep(self._pair(peer.hello.computes), result)
        return True

    async def _compare(self, peer: Peer) -> tuple[SelfCheck, float]:
        """Return the result, and how long the local prefill took, in seconds."""
        run, blocks, size = self.trials.run, self.blocks, self.compat.block_size
        # Not the first and last tokens of the vocabulary: there are the special tokens.
        ordinary = range(self.vocabulary // 4, 3 * self.vocabulary // 4)
        if longest := peer.hello.max_prompt_tokens:
            blocks = max(1, min(blocks, longest // size))
        tokens = random.choices(ordinary, k=blocks * size)
        salt, half = new_job_id(), blocks // 2 * size
        # At the same time, on two workers. If both fail, the second ends by itself.
        both = [run(tokens, salt=new_job_id(), blocks=blocks)]
        if half:
            # The prefill worker has the first half when it gets all: so it computes the second half
            # on top of a context, as it does for a prompt in chunks.
            both.append(run(tokens[: half + 1], salt=salt, writer=peer.name))
        local, *_ = await asyncio.gather(*both)
        remote = await run(tokens, salt=salt, writer=peer.name, blocks=blocks)
        if not local.pages or not remote.pages:
            raise Incomplete("the KV of the prompt could not be read")
        result = await asyncio.to_thread(self._judged, local, remote, peer.instance_id)
        return result, local.took_s

    def _judged(self, local: Trial, remote: Trial, prefill_instance: str) -> SelfCheck:
        kv_dtype, groups, layers = self.kv_dtype, self.trials.groups, self.compat.num_layers
        found = [
            difference.of_groups(a, b, kv_dtype, layers, groups)
            for a, b in zip(local.pages, remote.pages, strict=True)
        ]
        kv = max((value for value in found if value is not None), default=None)
        logprob = None
        if local.logprobs:
            logprob = difference.logprob_difference(local.logprobs, remote.logprobs)
        if kv is None and logprob is None:
            raise Incomplete(f"neither {kv_dtype} KV nor log probabilities could be compared")
        kv_most = difference.kv_tolerance(kv_dtype)
        logprob_most = difference.logprob_tolerance(self.compat.dtype)
        return SelfCheck(
            passed=(kv or 0.0) <= kv_most and (logprob or 0.0) <= logprob_most,
            kv_difference=kv,
            kv_tolerance=kv_most,
            logprob_difference=logprob,
            logprob_tolerance=logprob_most,
            decode_instance=self.instance_id,
            prefill_instance=prefill_instance,
        )


class Incomplete(Exception):
    """The comparison could not be made. The message says why."""


@dataclass(slots=True, eq=False)
class Trial:
    """One request of a comparison."""

    # Name of the prefill worker's connection. Empty: prefilled here.
    writer: str
    blocks: int  # how many of its first blocks are copied, in each KV cache group
    loaded: bool | None = None  # whether a remote prefill brought the KV. None: it has not ended
    took_s: float = 0.0  # how long the request took
    # The copied KV, once for each group of ranks that hold the same heads.
    pages: list[Pages] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Trials:
    """Requests that the decode worker sends its own engine for the self-check.

    They take the path of any request: vLLM's scheduler, the ledger, a prefill worker's claim,
    writes and commit. But the decision about them is made here, their job goes to the prefill
    worker that is checked, and they have no trace, so metrics do not count them. asyncio thread
    only, except where a heading says otherwise."""

    submit: EngineLoop
    memories: Sequence[LocalMemory]
    groups: Groups  # the KV cache groups of the model
    # How many of the most likely tokens get a log probability. None: no tokens.
    logprobs: int | None
    _open: dict[str, Trial] = field(init=False, default_factory=dict)

    async def run(
        self, tokens: Sequence[int], *, salt: str, writer: str = "", blocks: int = 0
    ) -> Trial:
        """Prefill `tokens` here, or by `writer`, and sample one token. Raises Incomplete."""
        name = f"self-check-{new_job_id()}"
        trial = self._open[name] = Trial(writer, blocks)
        request = requests.own_request(
            name, tokens, cache_salt=salt, arrival_time=time.time(), logprobs=self.logprobs
        )
        began = time.monotonic()
        try:
            output = await asyncio.wrap_future(self.submit.add(request))
        except HandoffError as exc:
            raise Incomplete(str(exc)) from exc
        finally:
            self.submit.abort(name, lambda: self._open.pop(name, None))
        trial.took_s = time.monotonic() - began
        if (found := output.new_logprobs) is not None:
            pairs = zip(found.logprob_token_ids[0], found.logprobs[0], strict=True)
            trial.logprobs = {int(token): float(value) for token, value in pairs}
        if writer and not trial.loaded:
            raise Incomplete("the prefill worker did not bring the KV")
        return trial

    # ------------------------------------------------------------------ engine thread

    def decision(self, request_id: str) -> Decision | None:
        """Return where to prefill a request of the self-check. None: it is no such request."""
        trial = self._open.get(request_id)
        if trial is None:
            return None
        # Asked again after the remote prefill has failed, the answer is local.
        return Decision(bool(trial.writer) and trial.loaded is None, "self_check", to=trial.writer)

    def settled(self, request_id: str, loaded: bool) -> None:
        """Note how the remote prefill of a request has ended."""
        if (trial := self._open.get(request_id)) is not None:
            trial.loaded = loaded

    def finished(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """Copy the request's blocks. vLLM is done with it, and has not reused them yet.

        tables: the block ids of the request, for each KV cache group."""
        trial = self._open.get(request_id)
        if trial is None or not trial.blocks or min(map(len, tables), default=0) < trial.blocks:
            return
        ids = [block for table in tables for block in table[: trial.blocks]]
        try:
            trial.pages = [
                self._of_layers(read_pages(self.memories, ids, copy=i), trial.blocks)
                for i in range(copies_of(self.memories))
            ]
        except Exception:  # e.g. no free memory on the GPU: the check is made again later
            logger.exception("the KV of a self-check could not be read")

    def _of_layers(self, pages: Pages, blocks: int) -> Pages:
        """Fill the memory that no layer of the blocks' group uses with zeros.

        It holds what the blocks held before, in a group with more layers."""
        most = max(self.groups.layers, default=0)
        for index, layers in enumerate(self.groups.layers):
            some = pages[index * blocks : (index + 1) * blocks]
            some.reshape(len(some), most, -1)[:, layers:] = 0
        return pages


def checks_for(
    context: DecodeContext, config: Any, compat: Compat, submit: EngineLoop, kept: SelfChecks
) -> Checks | None:
    """Make the self-check of this worker, or return None if nothing can be compared.

    That is so if no transport reaches the KV memory, if there is no model or it generates no text,
    or if no prompt of whole blocks may be prefilled remotely."""
    block_size = config.cache_config.block_size
    # At least two: the prefill worker computes the second one on top of the first.
    wanted = max(BLOCKS[0], min(BLOCKS[1], TOKENS // block_size))
    fits = context.blocks.longest_kept(wanted * block_size)
    blocks = min(fits, config.model_config.max_model_len - 2) // block_size
    computes = rounding_digest(config)
    generates = config.model_config.runner_type == "generate"
    if not context.worker.owner.transports or not computes or not generates or blocks < 1:
        return None
    kv_dtype = dtype_of_kv(config)
    trials = Trials(
        submit, context.worker.memories, context.worker.groups,
        # This worker samples in both prefills. So they say no more than the KV, if it can be read.
        logprobs=None if difference.readable(kv_dtype) else 5,
    )  # fmt: skip
    return Checks(
        instance_id=context.worker.instance_id,
        compat=compat,
        computes=computes,
        blocks=blocks,
        vocabulary=config.model_config.get_vocab_size(),
        kv_dtype=kv_dtype,
        trials=trials,
        kept=kept,
    )
