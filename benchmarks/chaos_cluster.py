"""The cluster that faults are made in: `tests/support/cluster.py` with several frontends, and eyes.

A worker that is started in place of another gets its core. Every process is ended with the cluster.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live import BenchError, wait_for
from tests.support import web
from tests.support.cluster import Cluster, Worker

STARTS_WITHIN_S = 180.0
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")


class ChaosCluster(Cluster):
    """See the module. `urls`: where each frontend answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._url_of: dict[int, str] = {}
        self._placed: dict[int, tuple[str, ...]] = {}

    def launch(self, role: str, *extra: str, **options: Any) -> Worker:
        if role != "frontend" and not extra:
            # Decode 0 and prefill 1 share core 0, decode 1 and prefill 0 core 1: as `up` places.
            extra = (f"--cpu={(len(self.of(role)) + (role == 'prefill')) % 2}",)
        worker = super().launch(role, *extra, **options)
        if role == "frontend":
            self._url_of[worker.pid] = self.frontend_url
        self._placed[worker.pid] = extra
        return worker

    def replace(self, old: Worker) -> Worker:
        """Start one like `old` in its place; does not wait."""
        return self.launch(old.role, *self._placed[old.pid])

    def bring_up(self, decode: int, prefill: int, frontends: int) -> None:
        """Everything, all at once, ready for requests."""
        self.start_servers()
        for role, count in (("decode", decode), ("prefill", prefill), ("frontend", frontends)):
            for _ in range(count):
                self.launch(role)
        self.whole()

    def whole(self) -> None:
        """Wait until every living process is ready and known to the others."""
        self.wait_ready(*self.workers_alive(), within_s=STARTS_WITHIN_S)
        for url in self.urls():
            wait_for(partial(self._serves, url), STARTS_WITHIN_S, f"{url} sees all decode workers")

    def _serves(self, url: str) -> bool:
        status = web.get(f"{url}/pullfill/status", timeout=5.0).json()
        known = {w["pid"] for w in status["workers"] if w["state"] == "ready"}
        ready = web.get(f"{url}/ready", timeout=5.0)
        return ready.status_code == 200 and {w.pid for w in self.of("decode")} <= known

    def workers_alive(self) -> list[Worker]:
        return [w for w in self.workers if w.alive]

    def urls(self) -> list[str]:
        """Of the living frontends."""
        return [self._url_of[w.pid] for w in self.of("frontend")]

    def url_of(self, frontend: Worker) -> str:
        return self._url_of[frontend.pid]

    def look_at(self, url: str) -> None:
        """Ask this frontend from now on."""
        self.frontend_url = url

    def probes(self, role: str) -> dict[str, str]:
        """Instance id → address of its probe server, of all that are registered."""
        return {name: record.http for name, record in self.records(role).items()}


class Freed:
    """Watches decode workers after a prefill worker was killed, every `every_s`.

    noticed, freed: time.monotonic when no decode worker counted it as connected any more, and when
    besides none had a block in quarantine: from then on its blocks are proved out of its reach.
    alone: it was the last one, so that no job may be open either. None: not within LIMIT_S.
    """

    LIMIT_S = 10.0

    def __init__(
        self, probes: dict[str, str], instance_id: str, *, alone: bool, every_s: float = 0.003
    ) -> None:
        self._probes, self._instance_id, self._alone = probes, instance_id, alone
        self._every_s = every_s
        self.noticed: float | None = None
        self.freed: float | None = None
        self._http = httpx.Client(timeout=5.0)

    def ready(self) -> None:
        """Open the connections; call right before the kill."""
        for url in self._probes.values():
            self._http.get(f"{url}/status")

    def wait(self) -> None:
        """Call right after the kill: watch until freed."""
        try:
            self._watch()
        finally:
            self._http.close()

    def _watch(self) -> None:
        give_up = time.monotonic() + self.LIMIT_S
        while time.monotonic() < give_up:
            loads = [self._http.get(f"{u}/status").json()["load"] for u in self._probes.values()]
            now = time.monotonic()
            if not any(self._instance_id in load["prefill_workers"] for load in loads):
                self.noticed = self.noticed or now
                busy = sum(load["quarantined_blocks"] for load in loads)
                if self._alone:
                    busy += sum(load["open_jobs"] for load in loads)
                if not busy:
                    self.freed = now
                    return
            time.sleep(self._every_s)


def logged_at(log: Path, pattern: str, since: float) -> float | None:
    """time.time() of the first line of a worker's log after `since` that matches; None: none."""
    for line in log.read_text(errors="replace").splitlines():
        stamp = _STAMP.match(line)
        if stamp and re.search(pattern, line):
            when = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp()
            at = when + int(stamp[2]) / 1000
            if at >= since - 0.001:
                return at
    return None


@contextmanager
def cluster_in(directory: Path, model: Path, **counts: int) -> Iterator[ChaosCluster]:
    """A whole cluster; its logs stay in `directory` as long as that does. Raises BenchError."""
    cluster = ChaosCluster(directory, model, lease_ttl_s=5)
    try:
        try:
            cluster.bring_up(**counts)
        except AssertionError as exc:
            raise BenchError(f"the cluster did not start: {exc}") from None
        yield cluster
    finally:
        cluster.stop()
