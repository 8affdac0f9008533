"""What the frontend room and the vLLM side of the frontend call on each other. No vLLM here.

`DecodePort` is implemented by `pullfill.frontend.dispatch`, `OutputSink` by
`pullfill.engine.front_client`. Both live on the frontend's event loop; nothing here is thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pullfill.engine.blame import Fault
from pullfill.engine.front_wire import DecodeWelcome


class DecodePort(Protocol):
    """The decode workers as one engine."""

    def submit(self, request: Any) -> None:
        """Take an EngineCoreRequest. Returns at once; every submitted request ends in outputs up
        to a finish reason, in `OutputSink.failed`, or in `abort`."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests here and at their workers. Unknown ids are ignored."""
        ...

    async def call(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        """Run an engine utility on every ready worker; one result each, in no order.

        Raises PeerUnavailable: no worker, none left, no answer in time, or a worker reported a
        failure (its text is in the message)."""
        ...

    def supported_tasks(self) -> tuple[str, ...] | None:
        """Tasks of the workers seen so far; None before the first."""
        ...


class OutputSink(Protocol):
    """Where the outputs of all workers come together."""

    def outputs(self, instance_id: str, outputs: Any) -> None:
        """EngineCoreOutputs of one worker, only for requests that are still at it."""
        ...

    def failed(self, request_id: str, message: str, fault: Fault = Fault.WORKERS) -> None:
        """The request cannot be finished.

        message: for the user.
        fault: why; decides the status of the answer."""
        ...

    def joined(self, welcome: DecodeWelcome) -> None:
        """A worker takes requests now."""
        ...

    def left(self, instance_id: str) -> None:
        """A worker is gone."""
        ...
