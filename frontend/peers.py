"""How many frontends there are.

A frontend whose process gets no time loses its lease, and so its key in the registry. Its requests
run on, and it registers again once it gets time. So a frontend whose key went without a drain still
counts for AWAY_S. This frontend always counts itself, whatever happened to its own key.
"""

from __future__ import annotations

import asyncio

from pullfill.registry.directory import Directory
from pullfill.wire import WorkerRecord, WorkerState

AWAY_S = 30.0
"""How long a frontend counts after its key has gone. If it has died, suspects wait for it that
long (`probation`)."""
ROLE = "frontend"


class Peers:
    """See the module. Single event loop.

    own_id: the instance id of this frontend."""

    def __init__(self, directory: Directory, own_id: str) -> None:
        self._directory = directory
        self._own_id = own_id
        self._loop = asyncio.get_running_loop()
        self._away: dict[str, float] = {}
        directory.subscribe(self._on_change)

    def count(self) -> int:
        """The number of frontends, this one included."""
        listed = self._directory.workers(ROLE)
        now = self._loop.time()
        away = {name for name, until in self._away.items() if until > now}
        return 1 + len((listed.keys() | away) - {self._own_id})

    def _on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        if old is None or new is not None or old.role != ROLE:
            return
        now = self._loop.time()
        self._away = {name: until for name, until in self._away.items() if until > now}
        if old.state is not WorkerState.DRAINING:
            self._away[old.instance_id] = now + AWAY_S
