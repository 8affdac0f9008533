"""What the rooms of the two sides bring to a worker process (worker.py)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from pullfill.engine.view import View
from pullfill.queue.nats_connection import NatsConnection
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.registry.self_checks import SelfChecks
from pullfill.wire import Compat, QueueSettings, WorkerRecord
from pullfill.worker.context import SchedulerHalf, WorkerContext
from pullfill.worker.engine_loop import EngineLoop
from pullfill.worker.memory import Copier


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is built, as its sides see it.

    context: describes the KV cache in memory.
    dead: set once the engine takes no more steps. asyncio thread.
    fail: ends the worker, for this reason. Any thread."""

    view: View
    loop: EngineLoop
    compat: Compat
    context: WorkerContext
    dead: asyncio.Event
    fail: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Servers:
    """What the sides of one worker share of NATS and etcd.

    nats: it is dialled once all sides are built.
    queue: settings. kept: results of self-checks."""

    etcd: EtcdClient
    nats: NatsConnection
    queue: Settings[QueueSettings]
    kept: SelfChecks


class Service(Protocol):
    """A side that serves. asyncio thread."""

    def describe(self, record: WorkerRecord) -> WorkerRecord:
        """Return what to publish: the record with the role's own fields.

        Everything granted under another incarnation than the record's is void from now on."""

    async def start(self, note: Callable[[], None]) -> None:
        """Begin to take work. The worker is registered.

        note: called when `checking` changes."""

    def checking(self) -> str:
        """Why the record says `checking`, for people. Empty: it does not."""

    def reasons(self) -> list[str]:
        """Why this worker is degraded, for /ready."""

    def status(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Further entries of /status, and of /status?jobs, ?ended and ?request=ID: see `Report`."""

    def refresh_metrics(self) -> None:
        """Set the gauges that nothing else sets."""

    def engine_stuck(self, stuck: bool) -> None:
        """Note that the engine takes no steps, or takes steps again."""

    async def stop_taking(self) -> None:
        """Take no new work, and tell the peers."""

    async def finished(self) -> None:
        """Return when all work is done, or the engine is dead."""

    async def give_up(self) -> None:
        """Let other workers do the work that is not done: migrate requests, nak jobs."""

    async def engine_gone(self, hangs: bool) -> None:
        """As `give_up`, as far as possible without the engine, which is dead.

        hangs: its thread may still run."""


class Role(ABC):
    """How one side of a worker is made.

        watch ─▶ make_half ─▶ build

    name: `decode` or `prefill`.
    serving: what the log says of a worker that serves.
    copiers: who may copy from or to the KV memory for this side."""

    name: ClassVar[str]
    kv_role: ClassVar[str]
    serving: ClassVar[str] = "is ready"
    copiers: Collection[Copier] = ()

    def adjust(self, config: Any) -> None:
        """Change vLLM's config, from which the engine is built next. Engine thread."""
        return None

    @abstractmethod
    def make_half(self, wake: Callable[[], None]) -> SchedulerHalf:
        """What answers vLLM's scheduler. Engine thread.

        wake: see `EngineHost`."""

    @abstractmethod
    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        """Open what needs etcd, but no engine. The model loads meanwhile."""

    @abstractmethod
    async def build(self, engine: Engine, servers: Servers, parts: AsyncExitStack) -> Service:
        """Make the side, ready to be registered. What it opens, it pushes onto `parts`."""


# By name, as vLLM gets the connector: the rooms of the sides import this one.
_ROLES = {
    "decode": ("pullfill.decode_worker.side", "DecodeRole"),
    "prefill": ("pullfill.prefill_worker.side", "PrefillRole"),
}


def role_of(side: str) -> Callable[..., Role]:
    """Return what makes the role of this name."""
    module, name = _ROLES[side]
    made: Callable[..., Role] = getattr(import_module(module), name)
    return made


class Neighbour(Protocol):
    """The decode side of a worker, for the prefill side of the same worker."""

    def take_back(self, body: bytes) -> bool:
        """Whether the decode side has sent this job. Then it prefills the prompt itself.

        Raises ClaimRefused: IN_PROGRESS if another prefill worker has the job, HELD if it may still
        write to its blocks."""

    def busy(self, step_s: float | None) -> str:
        """Why its streams leave no time for a job, for people. Empty: they do.

        step_s: seconds of a full step of prefill work, as measured. None: not measured yet."""

    def pace(self) -> tuple[float, float]:
        """Return how many tokens of jobs are computed here in a second, and what a second of that
        costs the streams: `tokens_per_s` and `harm` of `Load`. Both are 0 until measured."""

    def most(self, step_s: float | None) -> int | None:
        """How many jobs may be taken at a time, as each delays streams of this worker.

        None: they delay none. step_s: as for `busy`."""
