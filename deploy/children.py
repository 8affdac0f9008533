"""The processes of one `up`: started, and recorded in cluster.json.

Owner: the Supervisor, which holds the lock of the state directory whenever it starts one.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress

from pullfill.config import RESTARTS_ENV, ClusterFile, ProcessEntry
from pullfill.deploy.plan import ProcessSpec
from pullfill.deploy.procs import exit_words, spawn, start_time, tail
from pullfill.deploy.state import StateDir
from pullfill.deploy.view import ProcessView
from pullfill.errors import UnavailableError


class StartFailed(UnavailableError):
    """A process could not be started, died while it started, or was not ready in time."""


class Children:
    """cluster: what cluster.json says; written after every change."""

    def __init__(self, cluster: ClusterFile, state: StateDir, view: ProcessView) -> None:
        self.cluster = cluster
        self._state = state
        self._view = view
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._specs: dict[str, ProcessSpec] = {}

    def __getitem__(self, name: str) -> subprocess.Popen[bytes]:
        return self._running[name]

    @property
    def names(self) -> list[str]:
        return list(self._running)

    def spec(self, name: str) -> ProcessSpec:
        """How the process was started last."""
        return self._specs[name]

    def entry(self, name: str) -> ProcessEntry:
        """Its record in cluster.json."""
        return next(entry for entry in self.cluster.processes if entry.name == name)

    def launch(self, spec: ProcessSpec, note: str = "", restarts: int = 0) -> ProcessEntry:
        """Start a process, or start it again, and record it. Raises StartFailed."""
        log = self._state.log_of(spec.name)
        try:
            child = spawn(spec.argv, log=log, env={**spec.env, RESTARTS_ENV: str(restarts)})
        except OSError as exc:
            raise StartFailed(f"cannot start {spec.name} ({spec.argv[0]}): {exc.strerror}") from exc
        self._running[spec.name] = child
        self._specs[spec.name] = spec
        entry = ProcessEntry(
            name=spec.name,
            role=spec.role,
            instance_id=spec.instance_id,
            pid=child.pid,
            log=str(log),
            started=start_time(child.pid) or 0,
            url=spec.url,
            restarts=restarts,
        )
        entries = {e.name: e for e in self.cluster.processes}
        entries[spec.name] = entry  # in the place it had
        self.cluster.processes = list(entries.values())
        self._state.write_cluster(self.cluster)
        again = f"pid {child.pid}, restarts: {restarts}" if restarts else ""
        self._view.set(spec.name, "starting", again or note or spec.url or f"pid {child.pid}")
        return entry

    def raise_if_dead(self, name: str) -> None:
        """Raises StartFailed with the end of its log when the process has ended."""
        code = self._running[name].poll()
        if code is not None:
            self._view.set(name, "failed", exit_words(code))
            raise StartFailed(self.describe(name, f"died while starting ({exit_words(code)})"))

    def describe(self, name: str, what: str) -> str:
        """`what` happened to the process, and the end of its log."""
        log = self._state.log_of(name)
        lines = "".join(f"\n    {line}" for line in tail(log))
        return f"{name} {what}; its log ends with:{lines}\n  whole log: {log}"

    def let_go(self) -> None:
        """The processes go on without this one."""
        for child in self._running.values():
            # They are init's from now on; do not warn that they still run.
            child.returncode = child.poll() or 0

    def reap(self) -> None:
        """Collect what has ended."""
        for child in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=1)
