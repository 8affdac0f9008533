"""Starts the processes of one `up` and records them in cluster.json."""

from __future__ import annotations

import subprocess
from contextlib import suppress

from pullfill.config import RESTARTS_ENV, ClusterFile, ProcessEntry
from pullfill.deploy.plan import ProcessSpec
from pullfill.deploy.procs import exit_words, spawn, start_time, tail
from pullfill.deploy.state import StateDir
from pullfill.deploy.view import ProcessView
from pullfill.errors import UnavailableError
from pullfill.net.this_host import pid_space
from pullfill.runtime.lifecycle import LEAVING_ENV


class StartFailed(UnavailableError):
    """A process could not be started, died while it started, or was not ready in time."""


class Children:
    """The processes of one `up`.

    Who starts one holds the lock of the state directory.

    cluster: the content of cluster.json, which is written after every change. If it cannot be
    written, as on a full disk, one line says so, and the processes run on."""

    def __init__(self, cluster: ClusterFile, state: StateDir, view: ProcessView) -> None:
        self.cluster = cluster
        self.state = state
        self.view = view
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._recorded = True

    def __getitem__(self, name: str) -> subprocess.Popen[bytes]:
        return self._running[name]

    @property
    def names(self) -> list[str]:
        return list(self._running)

    def spec(self, name: str) -> ProcessSpec:
        """Return how the process was last started."""
        return self._specs[name]

    def entry(self, name: str) -> ProcessEntry:
        """Return the process's record in cluster.json."""
        return next(entry for entry in self.cluster.processes if entry.name == name)

    def launch(self, spec: ProcessSpec, note: str = "", restarts: int = 0) -> ProcessEntry:
        """Start a process, or start it again, and record it. Raises StartFailed."""
        log = self.state.log_of(spec.name)
        try:
            env = {**spec.env, RESTARTS_ENV: str(restarts)}
            if spec.instance_id:
                env[LEAVING_ENV] = str(self.state.leaving_of(spec.instance_id))
            child = spawn(spec.argv, log=log, env=env)
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
            space=pid_space(),
            url=spec.url,
            restarts=restarts,
            drain_s=spec.drain_s,
        )
        entries = {e.name: e for e in self.cluster.processes}
        entries[spec.name] = entry  # keeps its place
        self.cluster.processes = list(entries.values())
        self.record()
        again = f"pid {child.pid}, restarts: {restarts}" if restarts else ""
        self.view.set(spec.name, "starting", again or note or spec.url or f"pid {child.pid}")
        return entry

    def record(self) -> None:
        """Write cluster.json."""
        try:
            self.state.write_cluster(self.cluster)
        except OSError as exc:
            if self._recorded:
                self.view.say(f"cannot write to {self.state.path} ({exc.strerror}): other commands "
                              "see an old list of processes", "yellow")  # fmt: skip
            self._recorded = False
        else:
            self._recorded = True

    def raise_if_dead(self, name: str) -> None:
        """Raise StartFailed, with the end of its log, if the process has ended."""
        code = self._running[name].poll()
        if code is not None:
            self.view.set(name, "failed", exit_words(code))
            raise StartFailed(self.describe(name, f"died while starting ({exit_words(code)})"))

    def describe(self, name: str, what: str) -> str:
        """Return a message: `what` happened to the process, and the end of its log."""
        log = self.state.log_of(name)
        lines = "".join(f"\n    {line}" for line in tail(log))
        return f"{name} {what}; its log ends with:{lines}\n  whole log: {log}"

    def let_go(self) -> None:
        """Let the processes outlive this one."""
        for child in self._running.values():
            child.returncode = child.poll() or 0  # or Popen would warn that it still runs

    def reap(self) -> None:
        """Reap the children that have ended."""
        for child in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=1)
