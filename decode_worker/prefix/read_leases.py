"""Read leases: other decode workers copy cached blocks out of this worker's KV memory.

    asker: LeaseHello → Welcome
    LeaseAsk ──its own thread──▶ vLLM's block hashes of the prompt
             ──engine thread──▶ cached blocks found and pinned, fence opened ──▶ Lease
    LeaseEnd ──▶ fence revoked, LeaseEnded ──proved──▶ engine thread: blocks let go

A lease ends after LEASE_S at most, or with its connection. asyncio thread, except where a method
says otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pullfill.decode_worker.context import DecodeContext
from pullfill.engine import requests
from pullfill.engine.adapters import lora_request
from pullfill.engine.groups import cached_run, keeps_all
from pullfill.errors import BadMessage, ConfigError, NotNow, OverloadedError
from pullfill.net.channel import Channel
from pullfill.runtime import failpoints, log
from pullfill.runtime.lifecycle import Tasks
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.wire import (
    FenceToken,
    Goodbye,
    Lease,
    LeaseAsk,
    LeaseEnd,
    LeaseEnded,
    LeaseHello,
    NoLease,
    ToHolder,
    u32,
)

if TYPE_CHECKING:
    from pullfill.engine.view import View
    from pullfill.worker.engine_loop import EngineLoop

logger = log.get("decode_worker.leases")

# How long a lease is valid. A copy that takes longer is not worth it.
LEASE_S = 10.0
# Leases at a time, those that are asked for included.
MOST = 64
# Leases pin at most 1 / SHARE of the blocks.
SHARE = 4
NOT_HELD, BUSY = "not_held", "busy"


@dataclass(slots=True, eq=False)
class _Lease:
    """One lease."""

    number: int
    fence: FenceToken
    blocks: list[Any]  # vLLM's blocks that it pins
    timer: asyncio.TimerHandle | None = None
    unproved: bool = False  # the lease has ended, but its reader may still read


@dataclass(slots=True, eq=False)
class _Asker:
    """One connection."""

    channel: Channel
    name: str
    leases: dict[int, _Lease] = field(default_factory=dict)  # those that have not ended
    gone: bool = False  # the connection has ended


@dataclass(eq=False, repr=False)
class ReadLeases:
    """Gives leases to all askers, and ends them."""

    context: DecodeContext
    thread: EngineLoop
    view: View
    ours: LeaseHello  # what this worker says itself when it asks others
    # The hashes of a prompt of 128k tokens take 50 ms.
    _hashes: SerialExecutor = field(init=False, default_factory=SerialExecutor)
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    _numbers: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _asked: Tasks = field(init=False, default_factory=Tasks)  # one for each lease asked for
    # All leases whose blocks are pinned. Changed on the engine thread.
    _pinned: set[_Lease] = field(init=False, default_factory=set)
    _closed: bool = field(init=False, default=False)

    @property
    def open(self) -> int:
        """Number of leases that pin blocks, or have been asked for. Any thread may read it."""
        return len(self._asked) + len(self._pinned)

    @property
    def unproved_blocks(self) -> int:
        """Blocks of leases that have ended although their readers may still read, as a stopped
        process may. Any thread."""
        return sum(len(lease.blocks) for lease in self._pinned.copy() if lease.unproved)

    async def serve(self, channel: Channel, hello: LeaseHello) -> None:
        """Serve one asker until its connection ends. Raises what `Channel.hear` raises."""
        if why := self._why_refused(hello):
            channel.write(Goodbye(reason=why))
            return
        asker = _Asker(channel, hello.decode_instance)
        channel.write(self.context.welcome())
        logger.info("decode worker %s may read our prefix cache", asker.name)
        try:
            await channel.hear(ToHolder, partial(self._hears, asker))
        finally:
            asker.gone = True
            for lease in list(asker.leases.values()):
                self._over(asker, lease)

    async def drain(self) -> None:
        """Give no more leases, and wait for the end of those that are open: LEASE_S at most."""
        self._closed = True
        until = self._loop.time() + LEASE_S
        # A reader that is stopped is waited for only if our end would take the memory from it.
        frees = any(memory.freed_at_exit for memory in self.context.worker.memories)
        while self._loop.time() < until:
            stopped = 0 if frees else sum(lease.unproved for lease in self._pinned.copy())
            if self.open <= stopped:
                break
            await asyncio.sleep(0.01)

    def _why_refused(self, hello: LeaseHello) -> str:
        if hello.compat != self.ours.compat:
            return f"compatibility hash differs: {hello.compat} is not ours"
        if hello.computes != self.ours.computes:
            return "the two workers round differently, and no self-check compares decode workers"
        if not self.context.worker.owner.transports:
            return "no transport reaches its KV memory"
        if not keeps_all(self.context.worker.groups):
            return "its model does not keep the KV of all tokens in one group"
        return ""

    def _hears(self, asker: _Asker, message: Any) -> None:
        match message:
            case LeaseAsk():
                self._ask(asker, message)
            case LeaseEnd():
                self._end(asker, message)
            case _:
                raise BadMessage("an asker says only lease_ask and lease_end")

    def _ask(self, asker: _Asker, ask: LeaseAsk) -> None:
        size = self.context.blocks.block_size
        if ask.start % size or len(ask.token_ids) % 4 or len(ask.token_ids) // 4 <= ask.start:
            raise BadMessage("a lease is asked for whole blocks after the start")
        if self._closed or self.open >= MOST:
            asker.channel.write(NoLease(rid=ask.rid, reason=BUSY))
            return
        self._asked.begin(self._give(asker, ask), "give a lease")

    async def _give(self, asker: _Asker, ask: LeaseAsk) -> None:
        found: _Lease | str = BUSY
        try:
            made = await self._loop.run_in_executor(self._hashes, self._prepare, ask)
            found = await self.thread.call(partial(self._find, asker, ask, made))
        except NotNow as exc:
            logger.debug("no lease for %s: %s", asker.name, exc)  # we are leaving
        except Exception:
            logger.exception("no lease for %s", asker.name)
        if isinstance(found, str):
            asker.channel.write(NoLease(rid=ask.rid, reason=found))
            return
        asker.leases[found.number] = found
        if asker.gone:
            self._over(asker, found)
            return
        found.timer = self._loop.call_later(LEASE_S, self._over, asker, found)
        failpoints.hit("decode.before_lease")
        asker.channel.write(
            Lease(
                rid=ask.rid,
                lease=found.number,
                block_ids=u32.pack([block.block_id for block in found.blocks]),
                fence=found.fence,
                within_s=LEASE_S,
            ),
        )

    def _prepare(self, ask: LeaseAsk) -> Any:
        """Compute vLLM's block hashes of the prompt. On the thread of `_hashes`."""
        lora = None
        if (adapter := ask.adapter) is not None:  # vLLM refuses e.g. one without a path
            lora = self.context.worker.adapters.placed(lora_request(adapter))
        request = requests.own_request(
            "read-lease", (), cache_salt=ask.cache_salt, priority=0,
            arrival_time=time.time(), lora_request=lora,
        )  # fmt: skip
        return self.thread.prepare(request, memoryview(ask.token_ids))

    def _find(self, asker: _Asker, ask: LeaseAsk, made: Any) -> _Lease | str:
        """Pin the cached blocks and open a fence over them. Engine thread, between steps.

        Returns the reason if there is no lease."""
        pool, size = self.context.blocks.pool, self.context.blocks.block_size
        stop = min(made.num_prompt_tokens // size, len(made.block_hashes))
        room = self.view.config.cache_config.num_gpu_blocks // SHARE
        room -= sum(len(lease.blocks) for lease in self._pinned)
        # Only finished blocks are leased. Between two steps each cached block is computed, but with
        # pipeline parallelism a step may still run. Blocks that a prefill worker still writes, or
        # that are still copied, are not cached yet.
        if self.view.mid_step or room <= 0 or asker.gone:
            return BUSY
        blocks = cached_run(pool, size, made, ask.start // size, stop)[:room]
        if not blocks:
            return NOT_HELD
        ids = [block.block_id for block in blocks]
        try:
            fence = self.context.worker.owner.fences.open(ids, len(ids))  # to be read only
        except (ConfigError, OverloadedError):
            return BUSY
        # Referenced in vLLM's pool, a block is neither evicted nor reused.
        pool.touch(blocks)
        lease = _Lease(next(self._numbers), fence, blocks)
        self._pinned.add(lease)
        return lease

    def _end(self, asker: _Asker, said: LeaseEnd) -> None:
        failpoints.hit("decode.before_lease_end")
        lease = asker.leases.get(said.lease)
        if lease is not None:
            self._over(asker, lease)
        asker.channel.write(LeaseEnded(rid=said.rid, valid=lease is not None))

    def _over(self, asker: _Asker, lease: _Lease) -> None:
        """End a lease, for whatever reason. Afterwards no copy made under it is confirmed."""
        del asker.leases[lease.number]
        if lease.timer is not None:
            lease.timer.cancel()
        self._let_go(lease)

    def _let_go(self, lease: _Lease) -> None:
        """Revoke the fence, and look again until it is proved that nobody reads."""
        try:
            quiet = self.context.worker.owner.fences.try_revoke(lease.fence)
        except ConfigError as exc:
            logger.debug("leased blocks stay pinned: %s", exc)  # we are leaving
            return
        lease.unproved = not quiet
        if quiet:
            # Not before: so each read that the fence let pass has read what the block's hash says.
            self.thread.submit(lambda: self._unpin(lease), wake=False)
        else:
            # A copy takes milliseconds, and its reader lets go at the end.
            self._loop.call_later(0.02, self._let_go, lease)

    def _unpin(self, lease: _Lease) -> None:
        """Engine thread."""
        # The tail first: it is the least useful as a cached prefix.
        self.context.blocks.pool.free_blocks(reversed(lease.blocks))
        self._pinned.discard(lease)
