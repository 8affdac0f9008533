"""Tells decode workers at once, by `Heartbeat`, when this worker can pull no jobs, or can again.

Decode workers must not count a worker that cannot pull. Otherwise they would queue jobs that nobody
takes. asyncio thread only.
"""

from __future__ import annotations

from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.prefill_worker.puller import Puller
from pullfill.runtime import log
from pullfill.runtime.health import Health

logger = log.get("prefill_worker")


class Pulling:
    """Watches NATS and the engine. Lives as long as the worker."""

    def __init__(self, connections: DecodeLinks, puller: Puller, nats: Health) -> None:
        self._connections = connections
        self._puller = puller
        self._nats = nats
        self._stuck = False
        self._busy = ""
        self._checking = ""
        self._why_not = ""
        nats.on_change = self._look
        self._look()

    def close(self) -> None:
        """Watch NATS no more: the connection to it is about to be closed."""
        self._nats.on_change = lambda: None

    def engine_stuck(self, stuck: bool) -> None:
        """Note that the engine is stuck, or takes steps again."""
        self._stuck = stuck
        self._pause()

    def yields(self, why: str) -> None:
        """Note why other work of this worker goes first. Empty: no work does, so it pulls."""
        if why != self._busy:
            self._busy = why
            self._pause()

    def checks(self, why: str) -> None:
        """Note why no decode worker gets our KV before a self-check has passed. Empty: one does.

        Each decode worker is told its own reason (control_connections.py)."""
        if why != self._checking:
            if bool(why) != bool(self._checking):
                logger.info("%s", f"pulling no jobs: {why}" if why else "the self-check has passed")
            self._checking = why
            self._pause()

    def _pause(self) -> None:
        self._puller.pause(self._stuck or bool(self._busy or self._checking))
        self._look()

    def _look(self) -> None:
        why = "its engine takes no steps" if self._stuck else ""
        if not self._nats.up:
            why = why or f"NATS does not answer it: {self._nats.status().error}"
        why = why or self._busy
        if why == self._why_not:
            return
        self._why_not = why
        if why and why == self._busy:
            logger.debug("pulling no jobs: %s", why)
        elif why:
            logger.warning("pulling no jobs: %s", why)
        else:
            logger.info("pulling jobs again")
            self._puller.changed()
        self._connections.pause(why)
