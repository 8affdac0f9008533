"""Moves over a stream transport that are held up at a batch, and what waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pullfill.transfer.runs import Runs
from pullfill.wire import FenceToken
from tests.support.transfer_rigs import Region


def wait_for(condition: Callable[[], object], within_s: float = 20.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.001)


def served(region: Region) -> list[Any]:
    """The peers that the owner's threads serve."""
    return region.owner._server.peers  # type: ignore[attr-defined]


def revoke(region: Region, token: FenceToken) -> None:
    # Within half of a connection's stall time, which would end the owner's receive as well.
    wait_for(lambda: region.owner.fences.try_revoke(token), 10.0)


class Held:
    """Runs a move on a thread; the session's backend stops before its `nth` batch until `go_on`."""

    def __init__(self, session: Any, verb: str, token: FenceToken, nth: int = 2) -> None:
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        backend, calls = session._backend, [0]
        name = "send" if verb == "write" else "receive"
        real = getattr(backend, name)

        def stop(runs: Runs) -> None:
            calls[0] += 1
            if calls[0] == nth:
                self.stopped.set()
                assert self.go_on.wait(20)
            real(runs)

        setattr(backend, name, stop)
        blocks = range(64)
        self._thread = threading.Thread(
            target=self._run, args=(lambda: session.move(verb, token, blocks, blocks),)
        )
        self._thread.start()
        assert self.stopped.wait(20)

    def _run(self, move: Callable[[], object]) -> None:
        try:
            move()
        except BaseException as exc:
            self.error = exc

    def finish(self) -> BaseException | None:
        self.go_on.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.error
