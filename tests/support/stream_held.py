"""Moves over a stream transport that are held up at a batch, and what waits for them."""

from __future__ import annotations

import threading
from typing import Any

from pullfill.transfer.runs import Runs
from pullfill.wire import FenceToken
from tests.support.transfer_rigs import Region
from tests.support.waiting import Call, eventually


def served(region: Region) -> list[Any]:
    """The peers that the owner's threads serve."""
    return region.owner._server.peers  # type: ignore[attr-defined]


def revoke(region: Region, token: FenceToken) -> None:
    # Within half of a connection's stall time, which would end the owner's receive as well.
    eventually(lambda: region.owner.fences.try_revoke(token), within_s=10.0)


class Held(Call):
    """Runs a move on a thread; the session's backend stops before its `nth` batch until `go_on`."""

    def __init__(self, session: Any, verb: str, token: FenceToken, nth: int = 2) -> None:
        self.stopped, self.go_on = threading.Event(), threading.Event()
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
        super().__init__(session.move, verb, token, range(64), range(64))
        assert self.stopped.wait(20)

    def finish(self) -> BaseException | None:
        self.go_on.set()
        return self.end()
