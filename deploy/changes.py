"""Changes a running cluster of `up`: more or fewer processes, and processes that start again.

Runs in the supervisor, one order at a time (`orders.py`). The keeper restarts what dies. So a
process that is to end is first taken from the keeper, and one that was started is given to it when
it is ready, or has failed. Each start happens under the lock of the state directory. Each process
is recorded from its start to its end, so `pullfill down` finds all, whenever the order breaks off.

A process ends as with `pullfill down`: SIGTERM, which drains it, and after the drain timeout what
is left of its streams goes on at other workers.

An order changes no role of a worker with --elastic, though that would save a start: `decode-1`
would name a prefill worker, and a restart would undo it. `pullfill role` changes roles.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial

import msgspec

from pullfill.config import ClusterRef, ProcessEntry
from pullfill.deploy import defaults, devices, installed, plan
from pullfill.deploy.children import Children, StartFailed
from pullfill.deploy.down import SERVERS, remove_shared_memory, stop_phase
from pullfill.deploy.keeper import Keeper
from pullfill.deploy.members import etcd_of, workers
from pullfill.deploy.orders import Order, Say, Scale, Upgrade
from pullfill.deploy.procs import is_alive, send
from pullfill.deploy.readiness import keep_frontends_off, wait_ready
from pullfill.deploy.state import identity
from pullfill.deploy.up_options import UpOptions
from pullfill.errors import ConfigError, PullfillError, RegistryUnavailable, UnavailableError
from pullfill.runtime.lifecycle import EXIT_S

COUNTS = {"decode": "decode", "prefill": "prefill", "frontend": "frontends"}
"""The field of UpOptions with the number of processes, by role."""


class Changes:
    """See the module. The keeper is told what ends and what starts."""

    def __init__(
        self,
        options: UpOptions,
        children: Children,
        keeper: Keeper,
        ref: ClusterRef,
        cluster_id: str,
    ) -> None:
        options.first_workers = {role: getattr(options, role) for role in devices.ROLES}
        self._options = options
        self._children = children
        self._keeper = keeper
        self._ref = ref
        self._cluster_id = cluster_id

    async def carry_out(self, order: Order, say: Say) -> None:
        """Do what the order says, and tell each step. Raises ConfigError, UnavailableError."""
        with self._keeper.order():
            if isinstance(order, Scale):
                await self._scale(order.counts, say)
                return
            self._check_names(order.names)
            if isinstance(order, Upgrade):
                await self._upgrade(order.names, say)
            else:
                for name in order.names:
                    await self._restart(name, say)

    # ------------------------------------------------------------------ numbers

    async def _scale(self, counts: dict[str, int], say: Say) -> None:
        """Start processes, or end those with the highest numbers."""
        if wrong := [r for r, n in counts.items() if r not in COUNTS or n < 0]:
            raise ConfigError(f"{wrong[0]}={counts[wrong[0]]}: give ROLE=N of {', '.join(COUNTS)}")
        here = {role: self._there(role) for role in COUNTS}
        wanted = {role: counts.get(role, len(names)) for role, names in here.items()}
        if wanted["frontend"] and not wanted["decode"] and not self._options.by_stock:
            raise ConfigError("a frontend without a decode worker cannot serve: keep one, or end "
                              "the frontends too (frontend=0)")  # fmt: skip
        fresh = self._fresh(here, wanted)
        for role, count in counts.items():
            now = len(here[role])
            say(f"{role}: {now} -> {count}" if now != count else f"{role}: {now}, as it is")
        # First what starts: until then those that end still serve.
        if fresh:
            await self._grow(fresh, say)
        for role, names in here.items():
            for name in names[wanted[role] :]:
                await self._end(name, say)
                if not await self._keeper.locked(partial(self._children.remove, name)):
                    raise _stopping()
            setattr(self._options, COUNTS[role], wanted[role])

    def _there(self, role: str) -> list[str]:
        """Return the processes of the role that run or are started again, by number."""
        names = [name for name in self._keeper.watched if self._children.entry(name).role == role]
        return sorted(names, key=_number)

    def _fresh(self, here: dict[str, list[str]], wanted: dict[str, int]) -> list[plan.ProcessSpec]:
        """Return how to start what is missing. It gets the lowest numbers that are free."""
        ranks = plan.ranks_by_role(self._options)
        taken = [self._children.spec(name).place for names in here.values() for name in names]
        specs = []
        for role, names in here.items():
            free = (n for n in range(10**6) if f"{role}-{n}" not in names)
            for _ in range(wanted[role] - len(names)):
                place = defaults.Placement()
                if role in ranks:
                    place = devices.place_another(self._options, role, ranks[role], taken)
                    taken.append(place)
                name = f"{role}-{next(free)}"
                specs.append(
                    plan.worker_spec(self._options, self._ref, self._cluster_id, name, place)
                )
        return specs

    async def _grow(self, specs: Sequence[plan.ProcessSpec], say: Say) -> None:
        """Start these. If one does not get ready, end all of them again."""
        # Two workers that load on one GPU at the same time would count each other's memory.
        turns = [[spec] for spec in specs] if any(s.place.gpus for s in specs) else [list(specs)]
        for turn in turns:
            try:
                await self._start(turn, say)
            except PullfillError:
                await self._take_back(specs)
                raise

    async def _take_back(self, specs: Sequence[plan.ProcessSpec]) -> None:
        """End those of these processes that were started, at once."""
        names = [spec.name for spec in specs if spec.name in self._keeper.watched]
        await self._keeper.forget(*names)
        entries = [self._children.entry(name) for name in names]
        await stop_phase(entries, self._children.view, 0.0, lambda: True)
        remove_shared_memory([entry.instance_id for entry in entries if entry.instance_id])
        for name in names:
            await self._keeper.locked(partial(self._children.remove, name))

    # ------------------------------------------------------------------ one by one

    def _check_names(self, names: Sequence[str]) -> None:
        known = [e.name for e in self._children.cluster.processes if e.role not in SERVERS]
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(f"no worker or frontend {name!r}: {hint}"
                                  f"there are: {', '.join(known) or 'none'}")  # fmt: skip

    async def _restart(self, name: str, say: Say) -> None:
        try:
            async with etcd_of(self._ref):
                pass
        except RegistryUnavailable as exc:
            why = f"{name} was not restarted, because it could not join again: {exc}"
            raise UnavailableError(why) from exc
        role = self._children.entry(name).role
        if self._there(role) == [name] and role != "prefill":
            say(f"{name} is the only {role} here: requests are refused until it is back")
        await self._end(name, say)
        try:
            await self._start([plan.renewed(self._children.spec(name))], say)
        except StartFailed as exc:
            if not self._options.restart:
                raise
            if name not in self._keeper.watched:  # not even its program has started
                self._keeper.watch(name, started=False)
            raise StartFailed(f"{exc}\n  `up` goes on trying to start {name}") from None

    async def _upgrade(self, names: Sequence[str], say: Say) -> None:
        """Replace these processes, or all workers and frontends, by what is installed now."""
        here = [name for role in ("prefill", "decode", "frontend") for name in self._there(role)]
        old = installed.running()
        async with etcd_of(self._ref) as etcd:
            records = await workers(etcd, self._ref.namespace)
        vllm = next((r.compat.vllm for r in records if r.compat is not None), "")
        new = await asyncio.to_thread(installed.installed)
        installed.check(msgspec.structs.replace(old, vllm=vllm), new)
        say(f"pullfill {old.pullfill} -> {new.pullfill}, wire version {new.wire} as what runs")
        for name in names or here:
            spec = self._beside(name)
            await (self._restart(name, say) if spec is None else self._replace(name, spec, say))
        if new.pullfill != old.pullfill:
            say(f"NATS, etcd and the supervisor (pullfill {old.pullfill}) stay until the next `up`")

    def _beside(self, name: str) -> plan.ProcessSpec | None:
        """Return how to start the successor beside the process. None: there is no room for both."""
        old = self._children.spec(name)
        if old.role == "frontend" and self._there("frontend") != [name]:
            return None  # each has a port of its own. The others serve the common one meanwhile
        place = old.place
        if place.gpus:
            role, taken = old.role, [self._children.spec(n).place for n in self._keeper.watched]
            try:
                place = devices.place_another(self._options, role, place.ranks, taken)
            except ConfigError:
                return None
        fresh = f"{name}-next"
        return plan.worker_spec(self._options, self._ref, self._cluster_id, fresh, place)

    async def _replace(self, name: str, spec: plan.ProcessSpec, say: Say) -> None:
        """Start the successor, and end the process when that is ready. It gets the old name."""
        try:
            await self._start([spec], say)
        except PullfillError:
            await self._take_back([spec])
            raise
        await self._end(name, say)
        await self._keeper.forget(spec.name)

        def rename() -> None:
            self._children.remove(name)
            self._children.rename(spec.name, name)

        if not await self._keeper.locked(rename):
            raise _stopping()
        self._keeper.watch(name)

    async def _end(self, name: str, say: Say) -> None:
        """Drain the process, and wait until it has ended."""
        await self._keeper.forget(name)
        entry = self._children.entry(name)
        if is_alive(identity(entry)):
            say(f"{name} drains")
            if not await self._keeper.locked(partial(self._tell_to_end, entry)):
                raise _stopping()
            began, patience = time.monotonic(), self._drain_s(entry) + EXIT_S
            killed = await stop_phase([entry], self._children.view, patience, lambda: False)
            took = time.monotonic() - began
            say(f"{name} {'was killed' if killed else 'has ended'} after {took:.1f} s")
        self._children[name].poll()
        if entry.instance_id:
            remove_shared_memory([entry.instance_id])

    def _tell_to_end(self, entry: ProcessEntry) -> None:
        send(identity(entry), signal.SIGTERM)
        entry.told_to_end = True
        self._children.record()

    def _drain_s(self, entry: ProcessEntry) -> float:
        return entry.drain_s

    async def _start(self, specs: Sequence[plan.ProcessSpec], say: Say) -> None:
        """Start processes and wait until they are ready. Raises StartFailed if one is not.

        The keeper has all that were started afterwards."""
        launched: list[str] = []

        def launch() -> None:
            for spec in specs:
                self._children.launch(spec)
                launched.append(spec.name)

        began, names = time.monotonic(), [spec.name for spec in specs]
        try:
            if not await self._keeper.locked(launch):
                raise _stopping()
            say(f"{', '.join(names)} starts")
            await wait_ready(self._options, self._children, self._ref, specs)
            keep_frontends_off(self._options, self._children, names)
        finally:
            self._keeper.watch(*launched)
        say(f"{', '.join(names)} ready after {time.monotonic() - began:.1f} s")


def _number(name: str) -> int:
    return int(name.split("-")[1])


def _stopping() -> UnavailableError:
    return UnavailableError("the cluster is being stopped: the order ends here")
