"""Which decode worker holds which blocks, as this frontend knows it.

Each connection to a decode worker has a `Replica`, which follows the worker's block events into the
index that all share (pullfill/prefix/). `WorkerPool` calls this when a connection is made, brings
block events, or is lost. All on its event loop.

A worker whose events are missing is served like any other, but its blocks are unknown. So it is
told: `troubles`, for /ready and `pullfill status`, and a metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.errors import BadMessage
from pullfill.frontend import counters
from pullfill.frontend.decode_connection import DecodeConnection
from pullfill.prefix.events import Replica, State
from pullfill.prefix.index import PrefixIndex
from pullfill.wire.codec import decode
from pullfill.wire.prefix import PrefixEvents, PrefixFollow, PrefixPage


class _Followed(NamedTuple):
    """One connection to a worker whose events are followed."""

    connection: DecodeConnection
    replica: Replica

    def ask(self, question: PrefixFollow) -> None:
        self.connection.send(front_wire.FOLW, wire.encode(question))


class Prefixes:
    """The blocks of all decode workers.

    max_blocks: how many different blocks are kept, of all workers together. 0: nothing is kept, and
    no worker is asked.
    missing_s: events of a worker are missing when the index has not been complete for so long.
    index: who holds what. Read it only."""

    def __init__(self, max_blocks: int, missing_s: float = 10.0) -> None:
        self._missing_s = missing_s
        self.index = PrefixIndex(max_blocks)
        self._off = max_blocks == 0
        self._followed: dict[str, _Followed] = {}
        counters.PREFIX_BLOCKS.set_function(lambda: float(len(self.index)))

    def control(self, instance_id: str) -> str:
        """Return the address where this worker is asked for its blocks. Empty: not followed."""
        followed = self._followed.get(instance_id)
        return followed.connection.record.control if followed is not None else ""

    def status(self, instance_id: str, now: float) -> dict[str, Any]:
        """Return what is known of a worker, for JSON. now: seconds of the loop's clock.

        `state`: a `State` of prefix/events.py. `behind`: some events are missing, and what is known
        still counts. `none`: the worker has no events, or nobody asks."""
        told: dict[str, Any] = {"state": "none"}
        if (followed := self._followed.get(instance_id)) is not None:
            told["state"] = str(followed.replica.state)
            held = self.index.held(instance_id)
            told["blocks"], told["refused"] = len(held.blocks), held.refused
            told["since_s"] = now - followed.replica.since
        if trouble := self.troubles(now).get(instance_id):
            told["trouble"] = trouble
        return told

    def troubles(self, now: float) -> Mapping[str, str]:
        """Return for each worker whose events are missing what is wrong, in words for people."""
        return {
            name: f"its cached blocks are not known here for {now - each.replica.since:.0f} s "
            f"({each.replica.state}): prompts may go to other workers"
            for name, each in self._followed.items()
            if each.replica.state is not State.WARM and now - each.replica.since > self._missing_s
        }

    def follow(self, connection: DecodeConnection, now: float) -> None:
        """Ask a worker that has welcomed us for its blocks, and for all changes from then on."""
        name, welcome = connection.instance_id, connection.welcome
        self.forget(connection)
        if self._off or welcome is None or not welcome.prefix_block_size:
            return
        replica = Replica(self.index, name, now)
        followed = self._followed[name] = _Followed(connection, replica)
        followed.ask(replica.ask(now))

    def take(self, connection: DecodeConnection, payload: bytes, now: float) -> None:
        """Apply what a worker sends. Raises BadMessage if it cannot be read."""
        followed = self._followed.get(connection.instance_id)
        if followed is None or followed.connection is not connection:
            return
        message: PrefixEvents | PrefixPage
        message = decode(payload, PrefixEvents | PrefixPage)  # type: ignore[arg-type]
        try:
            question = followed.replica.take(message, now)
        except ValueError as exc:
            raise BadMessage(str(exc)) from exc
        if question is not None:
            followed.ask(question)
        for what, times in followed.replica.healing.items():
            counters.PREFIX_GAPS.labels(what).inc(times)
        followed.replica.healing.clear()

    def forget(self, connection: DecodeConnection) -> None:
        """Forget a worker whose connection is lost."""
        self._followed.pop(connection.instance_id, None)
        self.index.forget(connection.instance_id)

    def tick(self, now: float) -> None:
        """Ask workers again that have not answered, and set the gauge. Call about once a second."""
        for followed in self._followed.values():
            replica = followed.replica
            if replica.state is not State.WARM and now - replica.asked > self._missing_s / 5:
                followed.ask(replica.ask(now))
        counters.PREFIX_MISSING.set(len(self.troubles(now)))
