"""What the connector, which vLLM constructs from a class name, shares with the process around it.

One engine per process, so one context per kind: `install` puts it where the connector finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pullfill.engine.adapters import Adapters
from pullfill.engine.groups import ONE_GROUP, Groups
from pullfill.errors import ConfigError

if TYPE_CHECKING:
    from pullfill.engine.kv import Geometry
    from pullfill.transfer.contract import LocalMemory, Owner
    from pullfill.transfer.owners import MappedRank
    from pullfill.transfer.shm.files import RegionFiles

LATER: Any = None
"""The value of a field until the part that fills it is made."""


@dataclass(slots=True)
class WorkerContext:
    """The part that is the same in both kinds of worker.

    files: the files of the KV memory, made before the engine.
    geometry: the shape of the KV cache, once the ranks have told it.
    ranks: the memory of each rank, as this process maps it. Empty if no transport reaches it.
    owner: lets peers reach that memory. None: nobody can.
    adapters: the LoRA adapters of the engine.
    """

    instance_id: str
    files: RegionFiles | None = None
    geometry: Geometry | None = None
    ranks: list[MappedRank] = field(default_factory=list)
    owner: Owner | None = None
    adapters: Adapters = field(default_factory=Adapters)

    @property
    def memories(self) -> list[LocalMemory]:
        """Of all ranks, in order."""
        return [rank.memory for rank in self.ranks]

    @property
    def groups(self) -> Groups:
        """The KV cache groups of the model."""
        return self.geometry.attention.groups if self.geometry else ONE_GROUP


C = TypeVar("C", bound=WorkerContext)

_contexts: dict[type[WorkerContext], WorkerContext] = {}


def install(*contexts: WorkerContext) -> None:
    """Make each of `contexts` the one of its kind in this process."""
    _contexts.update({type(context): context for context in contexts})


def current(kind: type[C], role: str) -> C:
    """The installed context. Raises ConfigError when vLLM was started without pullfill."""
    if not isinstance(found := _contexts.get(kind), kind):
        raise ConfigError(
            f"the pullfill {role} connector works inside `pullfill {role}` only: start that"
        )
    return found
