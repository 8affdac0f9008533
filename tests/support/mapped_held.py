"""Moves of a mapped session that are held up inside a batch."""

from __future__ import annotations

import threading

from pullfill.transfer.contract import PeerSession
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.runs import Batch
from pullfill.transfer.session import MappedSession
from pullfill.wire import FenceToken


class Held:
    """A copier that stops inside the fence, before the first byte, until told to go on."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def copy(self, source: int, target: int, batch: Batch) -> None:
        self.inside.set()
        assert self.go_on.wait(20)
        copy_batch(source, target, batch)


def start_held(session: PeerSession, held: Held, verb: str, token: FenceToken) -> threading.Thread:
    assert isinstance(session, MappedSession)
    session._copy = held.copy

    def run() -> None:
        try:
            getattr(session, verb)(token, [0, 1, 2], [3, 4, 5])
        except BaseException as exc:
            held.error = exc

    thread = threading.Thread(target=run)
    thread.start()
    assert held.inside.wait(20)
    return thread
