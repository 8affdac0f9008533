"""What a frontend changes in vLLM's app, on top of vLLM's own classes.

- Errors: one type and status in bodies and in streams, and one line in the log.
- Streams of the Responses and Messages API end with an event that says why a request failed.

`FrontApp.build` applies all of it once, before the app serves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from openai.types.responses import ResponseFailedEvent
from vllm import exceptions
from vllm.exceptions import GenerationError, VLLMClientError, VLLMError

from pullfill.engine.blame import Fault
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.engine.front_client import FrontLLM

_log = log.get("engine.front_patches")

_APP = "vllm.entrypoints."


# vLLM prints the type of an exception in bodies, but `InternalServerError` in all streams. It logs
# a traceback of each request that it refuses in a stream or at /v1/messages.


class RequestRefused(VLLMClientError, GenerationError):  # type: ignore[misc]
    """The request cannot be served as it is: 400, so that no client library sends it again."""


# The second base of `RequestRefused`, and that of the others, keeps a traceback out of the log.
_RETRYABLE = getattr(exceptions, "RetryableRequestError", GenerationError)
_KINDS: dict[Fault, tuple[Any, HTTPStatus]] = {
    Fault.WORKERS: (_RETRYABLE, HTTPStatus.SERVICE_UNAVAILABLE),
    Fault.REQUEST: (RequestRefused, HTTPStatus.BAD_REQUEST),
    Fault.OURS: (GenerationError, HTTPStatus.INTERNAL_SERVER_ERROR),
}
# Types of errors by status, where vLLM does not derive them from the exception.
_TYPES = {400: "BadRequestError", 503: "ServiceUnavailableError"}


def failure(message: str, fault: Fault) -> Exception:
    """Return the error of a request that cannot be finished. vLLM answers with this message and the
    status of the fault, or ends a stream with an error event."""
    kind, status = _KINDS[fault]
    found: Exception = kind(message)
    found.status_code = status  # type: ignore[attr-defined]
    return found


def settle_errors(state: Any) -> None:
    """Let streams say what bodies say, and errors of requests be one line of the log.

    state: of vLLM's app, complete."""
    chat = state.openai_serving_chat
    for handler in (chat, state.openai_serving_completion):
        handler._convert_generation_error_to_streaming_response = (
            handler.create_streaming_error_response
        )
    create = chat.create_error_response

    # vLLM 0.33 converts errors of chat's streams here, and names `InternalServerError`.
    def typed(
        message: Any, err_type: str = _TYPES[400], status_code: int = 400, param: Any = None
    ) -> Any:
        return create(message, _TYPES.get(status_code, err_type), HTTPStatus(status_code), param)

    chat.create_error_response = typed
    for name in [n for n in logging.root.manager.loggerDict if n.startswith(_APP)]:
        logging.getLogger(name).addFilter(_one_line)


def _one_line(record: logging.LogRecord) -> bool:
    exc = record.exc_info[1] if record.exc_info else None
    if isinstance(exc, VLLMClientError | GenerationError):
        record.msg, record.args = "%s (%s)", (record.getMessage(), exc)
        record.exc_info = None
    return True


# vLLM's completions and chat tell errors themselves. Its Responses API cannot print an error and
# cuts the connection. Before 0.33, its Messages API tells that it cannot read chat's error.
# Begins the event with which a stream of chat ends if its request fails.
_ERROR = 'data: {"error"'


def tell_failures(state: Any, engine: FrontLLM) -> None:
    """Wrap the handlers in the state of vLLM's app. engine: refuses requests."""
    _of_responses(state.openai_serving_responses, engine)
    if not hasattr(state.anthropic_serving_messages, "chat_completion_stream_generator_raw"):
        _of_messages(state.anthropic_serving_messages)


def _of_responses(handler: Any, engine: FrontLLM) -> None:
    generate, stream = handler._generate_with_builtin_tools, handler.responses_stream_generator
    follow, run = handler.responses_background_stream_generator, handler._run_background_request

    def checked(request_id: str, engine_input: Any, sampling_params: Any, **more: Any) -> Any:
        # The stream begins before its request is submitted. Here its client can still get 400.
        engine.check(request_id, engine_input, sampling_params, more.get("lora_request"))
        return generate(
            request_id=request_id, engine_input=engine_input, sampling_params=sampling_params,
            **more,
        )  # fmt: skip

    def failed(request: Any, exc: Exception) -> dict[str, Any]:
        """Return what a failed response says, and keep it if the response is stored."""
        if not isinstance(exc, VLLMError):
            _log.exception("response %s failed", request.request_id)
        error = handler.create_error_response(exc).error
        # OpenAI has no code that is nearer to a bad request.
        code = "server_error" if error.code >= 500 else "invalid_prompt"
        said = {"status": "failed", "error": {"code": code, "message": error.message}}
        if stored := handler.response_store.get(request.request_id):
            for name, value in said.items():
                setattr(stored, name, value)
        return said

    def raised(exc: Exception) -> str:
        raise exc  # vLLM would make an event of it that it then cannot read

    async def streamed(request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        response, count = None, 0
        try:
            async for event in stream(request, *args, **kwargs):
                response, count = response or event.response, count + 1
                yield event
        except Exception as exc:
            if response is None:
                raise
            said = response.model_dump(mode="json", by_alias=True) | failed(request, exc)
            yield ResponseFailedEvent.construct(
                type="response.failed", sequence_number=count, response=said
            )

    async def followed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for event in follow(*args, **kwargs):
            yield event
            if event.type == "response.failed":
                return  # vLLM would wait for more events for ever

    async def ran(request: Any, *args: Any, **kwargs: Any) -> None:
        try:
            await run(request, *args, **kwargs)
        except Exception as exc:
            failed(request, exc)

    handler._generate_with_builtin_tools = checked
    handler.responses_stream_generator = streamed
    handler.responses_background_stream_generator = followed
    handler._run_background_request = ran
    handler._convert_generation_error_to_streaming_response = raised


def _of_messages(handler: Any) -> None:
    convert = handler.message_stream_converter

    async def told(chat: AsyncIterator[str]) -> AsyncIterator[str]:
        error: dict[str, Any] = {}

        async def good() -> AsyncIterator[str]:
            async for event in chat:
                if event.startswith(_ERROR):
                    error.update(json.loads(event.removeprefix("data: "))["error"])
                    return
                yield event

        async for event in convert(good()):
            yield event
        if error:
            said = {"type": "error", "error": {key: error[key] for key in ("type", "message")}}
            yield f"event: error\ndata: {json.dumps(said)}\n\n"

    handler.message_stream_converter = told
