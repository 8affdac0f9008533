"""What a side needs of vLLM. Our own loop (own_loop.py) is one way to give it.

A side must not know who steps the engine. It still does in some places: what stands here has
replaced such a place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Submit(Protocol):
    """Sends requests of our own to the engine. asyncio thread."""

    async def run(self, request: Any, forgotten: Callable[[], object]) -> Any:
        """Have the engine compute a request. Return its last EngineCoreOutput.

        Raises HandoffError if the engine refuses or fails it. If cancelled, it is aborted.

        request: vLLM's EngineCoreRequest.
        forgotten: called on the engine thread once the engine has no such request any more."""
