"""An engine host around a stand-in for vLLM's engine core."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pullfill.engine.host import EngineHost


class HostOf(EngineHost):
    """Runs `core` instead of an engine of vLLM's."""

    def __init__(self, core: Any, idle_ms: int = 1_000) -> None:
        config: Any = None
        super().__init__(config, idle_ms=idle_ms)
        self.core = core


def engine_threads() -> list[threading.Thread]:
    """The threads of engines that live now."""
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@contextmanager
def looping(host: EngineHost) -> Iterator[None]:
    """The host's loop runs on a thread of its own."""
    thread = threading.Thread(target=host.loop)
    thread.start()
    try:
        yield
    finally:
        host.stop()
        thread.join(10)
    assert not thread.is_alive()
