"""Whether NATS or etcd answers this process, since when, and why not.

Each connection owns one `Health`. Its loop writes it, any thread may read it. The status, /ready,
`pullfill explain` and the metric `pullfill_up` show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from prometheus_client import Gauge

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.wire.records import ServerStatus

UP = Gauge("pullfill_up", "Whether the server answers this process: 1 or 0", ["server"])

NAMES = {"nats": "NATS", "etcd": "etcd"}
CONNECTION = "connection"


class ServerHealth:
    """The state of one server as this process sees it.

    A server has parts that are checked separately: the connection, JetStream, pulls. It is up while
    no part fails.

    server: "nats" or "etcd".
    where: its address, without a login.
    """

    def __init__(self, server: str, where: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
        self.server = server
        self.where = where
        self._watchers: list[Callable[[], None]] = []
        self._clock = clock
        self._errors = {CONNECTION: "not connected yet"}
        self._since = clock.monotonic()
        UP.labels(server).set(0)

    def subscribe(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` called on the loop each time a part begins to fail, or answers again.

        Returns a function that ends this."""
        self._watchers.append(call)
        return lambda: self._watchers.remove(call) if call in self._watchers else None

    @property
    def up(self) -> bool:
        return not self._errors

    def error(self, *parts: str) -> str:
        """Why one of these parts did not answer last time, for people. Empty: all did."""
        return next((self._errors[part] for part in parts if part in self._errors), "")

    def ok(self, part: str = CONNECTION) -> None:
        """Note that `part` answered."""
        if self._errors.pop(part, None) is not None:
            self._turned(was_up=False)

    def failed(self, cause: str, part: str = CONNECTION) -> None:
        """Note that `part` did not answer. cause: for people."""
        was_up, failed_before = self.up, part in self._errors
        name = f"{NAMES[self.server]} at {self.where}"
        self._errors[part] = f"{self.where}: {cause.removeprefix(name).lstrip(': ')}"
        if not failed_before:
            self._turned(was_up)

    def status(self) -> ServerStatus:
        """Return its state. since_s: since it last went down or came up. Any thread."""
        errors = list(self._errors.values())
        return ServerStatus(
            up=not errors,
            since_s=self._clock.monotonic() - self._since,
            error=errors[0] if errors else None,
        )

    def outage(self) -> str:
        """One line for people. Empty while it is up."""
        return outage_of(self.server, self.status())

    def _turned(self, was_up: bool) -> None:
        """Note that a part begins to fail, or answers again."""
        if self.up is not was_up:
            self._since = self._clock.monotonic()
            UP.labels(self.server).set(self.up)
        for call in list(self._watchers):
            call()


def outage_of(server: str, status: ServerStatus) -> str:
    """One line for people. Empty while the server is up."""
    if status.up:
        return ""
    return f"{NAMES.get(server, server)} unreachable for {status.since_s:.0f} s: {status.error}"


def servers_json(*healths: ServerHealth) -> Mapping[str, object]:
    """`servers` of a status: {"nats": {"up", "since_s", "error"}, ...}."""
    return {health.server: msgspec.to_builtins(health.status()) for health in healths}
