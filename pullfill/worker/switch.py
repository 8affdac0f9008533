"""Which roles a worker has now, and how it gets to the roles that it is ordered to have.

    resting ──begin──▶ serving ──stop_taking──▶ draining ──finished──▶ resting

Each role has a `Side` with this life. `Switch.run` follows the last order: it drains the sides that
must rest, then begins the others, and tries again until that works or another order comes. The
engine runs on. If SIGTERM comes, or the lease of a side that serves is revoked, the sides that
serve drain and the process leaves. If the process dies, `pullfill up` starts it again in the role
of its command line. asyncio thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from pullfill.errors import PullfillError, UnavailableError
from pullfill.registry.membership import Membership
from pullfill.runtime import failpoints, log
from pullfill.wire import WorkerState
from pullfill.worker.sides import Role, Service

logger = log.get("worker.switch")
UP = {"up": True}


class Side:
    """One side of the worker. See the module.

    as_role: makes the membership of a role's service.
    membership, service: while it serves or drains. last: the service, also while it rests."""

    def __init__(self, role: Role[Any], as_role: Callable[[str, Service], Membership]) -> None:
        self.name = role.name
        self._role = role
        self._as_role = as_role
        self._parts = AsyncExitStack()
        self.membership: Membership | None = None
        self.service: Service | None = None
        self.last: Service | None = None
        self.draining = False
        self._watch: asyncio.Task[None] | None = None

    async def begin(self, wait_s: float, revoked: asyncio.Event) -> None:
        """Register, and take work. Raises PullfillError. After any error the side rests.

        wait_s: how long to try while etcd does not answer.
        revoked: is set when somebody revokes the lease, until `end`."""
        try:
            service = await self._role.open(self._parts)
            membership = self._as_role(self.name, service)
            self.service = self.last = service
            self.membership = membership
            await membership.join(wait_s)
            await service.start(membership.refresh)
            watch = _pass_on(membership.revoked, revoked)
            self._watch = asyncio.create_task(watch, name=f"revoked {self.name}")
        except BaseException:
            await self.end()
            raise

    async def stop_taking(self) -> None:
        """Take no new work, and tell everybody. Idempotent."""
        if self.service is None or self.membership is None:
            return
        self.draining = True
        await asyncio.gather(
            self.service.stop_taking(), self.membership.set_state(WorkerState.DRAINING)
        )

    async def drain(self, timeout_s: float) -> None:
        """Finish the work, or let other workers do what is left of it after `timeout_s`."""
        await self.stop_taking()
        if self.service is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.service.finished()
        except TimeoutError:
            await self.service.give_up()

    async def end(self) -> None:
        """Leave the registry, and rest. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()  # first: our own leaving is no order to drain
            self._watch = None
        membership, self.membership = self.membership, None
        if membership is not None:
            await membership.leave()
        await self._parts.aclose()
        await self._role.close()
        self.service, self.draining = None, False


class Switch:
    """Owns the sides of one worker. See the module.

    first: the role in which it begins.
    revoked: set when somebody has revoked the lease of a side that serves.
    told: what the switch is doing, for people. Empty: nothing."""

    def __init__(
        self,
        sides: Sequence[Side],
        first: str,
        drain_timeout_s: float,
        again_s: float = 1.0,
    ) -> None:
        self._sides = {side.name: side for side in sides}
        self._again_s = again_s
        self._wanted = frozenset({first})
        self._drain_timeout_s = drain_timeout_s
        self._ordered = asyncio.Event()
        self.revoked = asyncio.Event()
        self.told = ""

    @property
    def serving(self) -> list[Side]:
        """The sides that do not rest, decode first."""
        return [side for side in self._sides.values() if side.service is not None]

    @property
    def services(self) -> list[Service]:
        """Those of the sides that serve, decode first."""
        return [side.service for side in self._sides.values() if side.service is not None]

    @property
    def sides(self) -> list[Side]:
        return list(self._sides.values())

    @property
    def roles(self) -> str:
        """`decode`, `prefill`, or `both`. While it changes: the role that still serves, if any."""
        names = [side.name for side in self.serving]
        return "both" if len(names) > 1 else "".join(names)

    def order(self, wanted: frozenset[str]) -> None:
        """Have `run` bring the worker to these roles. The last order counts."""
        if wanted != self._wanted:
            logger.info("ordered to be %s", " and ".join(sorted(wanted)))
        self._wanted = wanted
        self._ordered.set()

    async def run(self) -> None:
        """Follow orders until cancelled."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            try:
                while await self._step():
                    pass
            except Exception as exc:
                level = logger.warning if isinstance(exc, PullfillError) else logger.exception
                told = f"waits for another try: {exc}"
                if told != self.told:  # not each second of an outage
                    level("the change of roles has failed, and is tried again: %s", exc)
                self.told = told
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._again_s):
                        await self._ordered.wait()
                self._ordered.set()

    async def _step(self) -> bool:
        """Make one change towards what is wanted. Returns False if there is nothing to change."""
        for side in self.serving:
            if side.name not in self._wanted:
                self._look_before_leaving()
                await self._rest(side)
                return True
        for name in sorted(self._wanted):
            if self._sides[name].service is None:
                self.told = f"begins to {name}"
                await self._begin(self._sides[name], 0.0)
                return True
        self.told = ""
        return False

    def _look_before_leaving(self) -> None:
        """Raises UnavailableError if the wanted roles could not begin now.

        In no role at all the worker could not be ordered back."""
        told = [service.status().get("servers", {}) for service in self.services]
        # All need etcd. Prefill needs NATS, too.
        needed = ("etcd", "nats") if "prefill" in self._wanted else ("etcd",)
        down = [name for name in needed if not all(one.get(name, UP)["up"] for one in told)]
        if down:
            raise UnavailableError(f"{' and '.join(down)} cannot be reached")

    async def _begin(self, side: Side, wait_s: float) -> None:
        await side.begin(wait_s, self.revoked)
        logger.info("this worker is %s now", self.roles)

    async def _rest(self, side: Side) -> None:
        self.told = f"drains its {side.name} side"
        logger.info("draining the %s side", side.name)
        await side.drain(self._drain_timeout_s)
        failpoints.hit("elastic.drained")
        await side.end()
        failpoints.hit("elastic.left")

    # ------------------------------------------------------------------ begin and end

    async def join(self, wait_s: float = 0.0) -> None:
        """Begin the first role. Raises PullfillError."""
        for name in self._wanted:
            await self._begin(self._sides[name], wait_s)

    async def stop_taking(self) -> None:
        """Take no new work in any role, and tell everybody."""
        await asyncio.gather(*(side.stop_taking() for side in self.serving))

    def note_state(self, state: WorkerState) -> None:
        """Publish `state` without waiting. Sides that drain stay draining."""
        for side in self.serving:
            if side.membership is not None and not side.draining:
                side.membership.note_state(state)

    async def leave(self) -> None:
        """End all sides, for good."""
        for side in self._sides.values():
            await side.end()


async def _pass_on(event: asyncio.Event, to: asyncio.Event) -> None:
    await event.wait()
    to.set()
