"""What the connector shares with the process around it, and what it calls on each side.

vLLM constructs the connector from a class name, so nothing can be passed to it. There is one engine
in a process, and `install` puts both where its connector finds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pullfill.engine.adapters import Adapters
from pullfill.engine.groups import ONE_GROUP, Groups, Tables
from pullfill.engine.view import View
from pullfill.errors import ConfigError

if TYPE_CHECKING:
    from pullfill.engine.kv import Geometry
    from pullfill.transfer.contract import LocalMemory
    from pullfill.transfer.owners import MappedRank, Owner
    from pullfill.transfer.shm.files import RegionFiles
    from pullfill.worker.step_meter import StepMeter

KeptFrom = Callable[[int], tuple[int, ...]]
ByPosition = Callable[[Any], Any]
LATER: Any = None
"""The value of a field until the part that fills it is made."""


@dataclass(slots=True)
class WorkerContext:
    """What all sides of one worker share.

    files: the files of the KV memory, made before the engine.
    geometry: the shape of the KV cache, once the ranks have told it.
    ranks: the memory of each rank, as this process maps it. Empty if no transport reaches it.
    why_not: what is missing for other processes to reach it, as a rank has told.
    owner: lets peers reach that memory, from `memory.open_to_peers` on.
    adapters: the LoRA adapters of the engine.
    in_flight: vLLM's set of requests for which it reserves blocks, once the engine is built.
    """

    instance_id: str
    files: RegionFiles = LATER
    geometry: Geometry | None = None
    ranks: list[MappedRank] = field(default_factory=list)
    why_not: str = ""
    owner: Owner = LATER
    adapters: Adapters = field(default_factory=Adapters)
    in_flight: set[Any] = field(default_factory=set)

    @property
    def memories(self) -> list[LocalMemory]:
        """Of all ranks, in order."""
        return [rank.memory for rank in self.ranks]

    @property
    def groups(self) -> Groups:
        """The KV cache groups of the model."""
        return self.geometry.groups if self.geometry else ONE_GROUP


@dataclass(slots=True)
class StepReport:
    """What vLLM must be told of requests. It crosses processes, so it holds plain types only.

    loaded: their KV has come. failed: their KV will not come, so vLLM computes it.
    sent: they are finished, and nobody reads their blocks any more, so vLLM frees these."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)


class SchedulerHalf(ABC):
    """What one side answers vLLM's scheduler, through the connector, and reports between steps.

    Engine thread. Nothing here may block. What raises ends the engine.

    request: vLLM's Request. tables: its block ids, for each KV cache group.
    step_meter: measures and plans steps. None: another side does, or the engine is not built."""

    step_meter: StepMeter | None = None

    @property
    def deferred(self) -> dict[str, bool]:
        """See StepMeter."""
        return self.step_meter.deferred if self.step_meter is not None else {}

    @abstractmethod
    def bind(self, manager: Any, kept_from: KeptFrom, by_position: ByPosition) -> None:
        """Take vLLM's KVCacheManager, and functions of `engine.groups`."""

    def built(self, view: View) -> None:
        """The engine is built. It has taken no step yet."""
        return None

    def owns(self, request_id: str) -> bool:
        """Whether the request is of this side. What nobody else owns is of the first side."""
        return False

    @abstractmethod
    def matched(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        """vLLM's `get_num_new_matched_tokens`."""

    @abstractmethod
    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        """vLLM's `update_state_after_alloc`."""

    def loaded(self, output: Any) -> None:
        """vLLM's `update_connector_output`."""
        return None

    @abstractmethod
    def finished(self, request: Any, tables: Tables) -> bool:
        """vLLM is done with a request. Returns True if it must keep the blocks until `sent`."""

    @abstractmethod
    def before_step(self) -> StepReport:
        """Called between two steps, and before the loop sleeps. Returns what vLLM must be told now.

        Nothing of it may be `failed`: vLLM takes that only with a step."""

    def plan(self) -> None:
        """Called after that, once vLLM knows what all sides have reported: plan the next step."""
        if self.step_meter is not None:
            self.step_meter.before_step()

    @abstractmethod
    def scheduled(self, output: Any) -> StepReport:
        """vLLM has scheduled a step. Returns what this step must tell vLLM.

        output: vLLM's SchedulerOutput."""

    @abstractmethod
    def step_done(self, running: int) -> None:
        """A step has run, on every rank.

        running: number of scheduled steps that have not run yet. They are the last ones."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `scheduled` has something to report. Then the engine must take a step, even if it
        has no request to compute."""


_installed: list[tuple[WorkerContext, Sequence[SchedulerHalf]]] = []


def install(context: WorkerContext, *halves: SchedulerHalf) -> None:
    """Make these the sides of the connector that vLLM constructs in this process."""
    _installed[:] = [(context, halves)]


def installed() -> tuple[WorkerContext, Sequence[SchedulerHalf]]:
    """Return the sides of the connector that vLLM constructs. Raises ConfigError if there are none.

    Whoever starts the engine has installed them: a worker of our own (process.py), or in stock
    `vllm serve` the connector itself (stock_core.py)."""
    if not _installed:
        raise ConfigError(
            "WorkerConnector works inside pullfill's own workers only. For stock `vllm serve` "
            "name PullfillDecode of pullfill.worker.stock_core"
        )
    return _installed[0]
