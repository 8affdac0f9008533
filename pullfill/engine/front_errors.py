"""What vLLM's app says of a request that fails: one type of error, in bodies and in streams.

`failure` makes the exception, `settle` prepares the app. vLLM prints the type of an exception in
bodies, but `InternalServerError` in all streams. It logs a traceback of each request that it
refuses in a stream or at /v1/messages.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from vllm import exceptions
from vllm.exceptions import GenerationError, VLLMClientError

from pullfill.engine.blame import Fault

_APP = "vllm.entrypoints."


class RequestRefused(VLLMClientError, GenerationError):  # type: ignore[misc]
    """The request cannot be served as it is: 400, so that no client library sends it again."""


# The second base of `RequestRefused`, and that of the others, keeps a traceback out of the log.
_KINDS: dict[Fault, Any] = {
    Fault.WORKERS: getattr(exceptions, "RetryableRequestError", GenerationError),
    Fault.REQUEST: RequestRefused,
    Fault.OURS: GenerationError,
}
_STATUS = {
    Fault.WORKERS: HTTPStatus.SERVICE_UNAVAILABLE,
    Fault.REQUEST: HTTPStatus.BAD_REQUEST,
    Fault.OURS: HTTPStatus.INTERNAL_SERVER_ERROR,
}


def failure(message: str, fault: Fault) -> Exception:
    """Return the error of a request that cannot be finished. vLLM answers with this message and the
    status of the fault, or ends a stream with an error event."""
    found: Exception = _KINDS[fault](message)
    found.status_code = _STATUS[fault]  # type: ignore[attr-defined]
    return found


def settle(state: Any) -> None:
    """Let streams say what bodies say, and errors of requests be one line of the log.

    state: of vLLM's app, complete."""
    for handler in (state.openai_serving_chat, state.openai_serving_completion):
        handler._convert_generation_error_to_streaming_response = (
            handler.create_streaming_error_response
        )
    for name in [n for n in logging.root.manager.loggerDict if n.startswith(_APP)]:
        logging.getLogger(name).addFilter(_one_line)


def _one_line(record: logging.LogRecord) -> bool:
    exc = record.exc_info[1] if record.exc_info else None
    if isinstance(exc, VLLMClientError | GenerationError):
        record.msg, record.args = "%s (%s)", (record.getMessage(), exc)
        record.exc_info = None
    return True
