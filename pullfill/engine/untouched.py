"""Which requests a failed step of the engine cannot have touched.

A step schedules requests, then runs the model for them. A request that waits in vLLM's queue and
was never scheduled has no part in the model's run. vLLM takes requests off the head of its queue,
so while it schedules it looks at no other request of the queue than the head. Requests that it has
looked at and put aside are not in the queue until scheduling is over.

Called on the engine thread, after the step has raised.
"""

from __future__ import annotations

import traceback
from typing import Any


def untouched(scheduler: Any, error: BaseException) -> set[str]:
    """The requests in the queue of vLLM's scheduler that are not suspected of this error."""
    from vllm.v1.request import RequestStatus

    fresh = [
        request
        for request in scheduler.waiting
        if request.status == RequestStatus.WAITING and not request.num_computed_tokens
    ]
    if fresh and _while_scheduling(scheduler, error):
        head = scheduler.waiting.peek_request()
        fresh = [request for request in fresh if request is not head]
    return {request.request_id for request in fresh}


def _while_scheduling(scheduler: Any, error: BaseException) -> bool:
    code = type(scheduler).schedule.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))
