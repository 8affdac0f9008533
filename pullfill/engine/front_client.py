"""vLLM's EngineCoreClient over any number of decode workers.

`AsyncLLM` believes it talks to one engine core. Here its requests go to a `DecodePort`, and the
outputs of all workers come back through one queue. `resources.engine_dead` stays False: the loss of
a worker fails at most that worker's requests, through `failed`, never the frontend.

Everything runs on the event loop of the AsyncLLM that owns the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

from vllm import envs
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM, InputStreamError
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from pullfill.engine import request_limits
from pullfill.engine.blame import Fault, explained, fault_of
from pullfill.engine.front_adapters import Board, FrontAdapters
from pullfill.engine.front_patches import failure
from pullfill.engine.front_wire import DecodeWelcome, LoadReport
from pullfill.engine.request_limits import strip_transfer_params
from pullfill.errors import BadMessage, PeerUnavailable, PullfillError
from pullfill.runtime import failpoints, log
from pullfill.wire import MAX_TEXT

_log = log.get("engine.front_client")

UTILITY_TIMEOUT_S = 10.0
# To load an adapter, or to end a profile, may take so many times longer.
_SLOW = 12
# vLLM asks for them once, to make its routes: before there is a worker.
_TASKS = ("generate",)
# Cached properties of vLLM's renderer that hold `max_model_len`.
_CACHED_LIMITS = ("default_cmpl_tok_params", "default_chat_tok_params")
# So often vLLM's gauges hear of changed loads, at most.
LEVELS_S = 1.0


class DecodePort(Protocol):
    """The decode workers as one engine. The frontend room implements it."""

    def submit(self, request: Any) -> None:
        """Take an EngineCoreRequest. Returns at once.

        A request ends in one of three ways: with an output that has a finish reason, with a call of
        `DecodeClient.failed`, or with a call of `abort`."""

    def abort(self, request_ids: Sequence[str], *, answered: bool = False) -> None:
        """Forget these requests here and at their workers. Unknown ids are ignored.

        answered: a stop string has ended their answers. Otherwise their clients went away."""

    async def call(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        """Run an engine utility on every ready worker. One result for each, in no order.

        Raises PeerUnavailable: no worker, none left, no answer in time, or a worker reported a
        failure (its text is in the message)."""


class FrontLLM(AsyncLLM):  # type: ignore[misc]
    """AsyncLLM that tells bad requests from bugs (`blame`).

    A request that vLLM's validation refuses gets 400 and the reason. Any other failure gets 500
    with a message that says whose fault it is. vLLM's own 500 has no message.

    client_of: makes the engine core, of vLLM's output processor and its renderer."""

    def __init__(self, client_of: Callable[[Any, Any], EngineCoreClient], **kwargs: Any) -> None:
        original = EngineCoreClient.__dict__["make_async_mp_client"]
        EngineCoreClient.make_async_mp_client = staticmethod(
            lambda *_, **__: client_of(self.output_processor, self.renderer)
        )
        try:
            super().__init__(**kwargs)
        finally:
            EngineCoreClient.make_async_mp_client = original

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        # Here and not in `add_request`: a stream has not begun, so its client can get 400.
        # vLLM bounds the prompts, and n. Their product is bounded here.
        most = max(getattr(envs, "VLLM_MAX_COMPLETION_PROMPTS", 1024), envs.VLLM_MAX_N_SEQUENCES)
        if why := request_limits.why_too_many(sampling_params.n, most):
            raise VLLMValidationError(why)
        streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        if streamed:
            self.check(request_id, prompt, sampling_params, kwargs.get("lora_request"))
        outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        if streamed and sampling_params.n > 1 and sampling_params.prompt_logprobs is not None:
            return _with_prompt_logprobs(outputs)
        return outputs

    def check(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        """Raise what `add_request` would raise for a rendered prompt and these parameters.

        Call it before a stream begins. Nothing is submitted."""
        with _told(request_id):
            _settle(params)
            if isinstance(prompt, dict) and "type" in prompt:
                self.input_processor.process_inputs(
                    request_id, prompt, params, supported_tasks=_TASKS, lora_request=lora_request
                )

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        request_limits.submitted()
        with _told(request_id, InputStreamError):
            _settle(params)
            return await super().add_request(request_id, prompt, params, *args, **kwargs)


def _settle(params: Any) -> None:
    """Add the targets of the HTTP request. Raises VLLMValidationError."""
    request_limits.apply_targets(params)
    if why := request_limits.why_refused(params):
        raise VLLMValidationError(why)


@contextmanager
def _told(
    request_id: str, passed: Callable[[Exception], Exception] = lambda exc: exc
) -> Iterator[None]:
    """Raise VLLMValidationError for what the request is to blame for, else our own error.

    passed: what makes the caller raise that error. `AsyncLLM.generate` replaces most others."""
    try:
        yield
    except (VLLMClientError, GracefulHTTPError, EngineDeadError):
        raise
    except Exception as exc:
        if fault_of(exc) is Fault.REQUEST:
            _log.warning("request %s is refused: %s", request_id[:MAX_TEXT], exc)
            raise VLLMValidationError(
                f"the request has a value that cannot be used ({type(exc).__name__}: {exc})"
            ) from exc
        _log.exception("request %s could not be taken in", request_id[:MAX_TEXT])
        raise passed(failure(explained(exc, "the frontend"), Fault.OURS)) from exc


async def _with_prompt_logprobs(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Repeat the log probabilities of the prompt in each output of a stream with several choices.

    vLLM has them only in the first output of each choice, and loses them when it merges that with
    an output of another choice. But its completions echo the prompt once for each choice."""
    found = None
    async for output in outputs:
        found = output.prompt_logprobs = output.prompt_logprobs or found
        yield output


class DecodeClient(EngineCoreClient):  # type: ignore[misc]
    """See the module.

    processor, renderer: of the AsyncLLM that owns the client.
    port_of: makes the port, which sends its outputs to this client."""

    def __init__(
        self,
        vllm_config: Any,
        processor: Any,
        renderer: Any,
        port_of: Callable[[DecodeClient], DecodePort],
        board: Board,
    ) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._processor = processor
        self._renderer = renderer
        self._config = vllm_config
        self.port = port_of(self)
        self.adapters = FrontAdapters(self.port, board, _SLOW * UTILITY_TIMEOUT_S)
        self._queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._reader: asyncio.Task[Any] | None = None
        self._loads: dict[str, LoadReport] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._own_len = vllm_config.model_config.max_model_len
        self._lens: dict[str, int] = {}

    def shutdown(self, timeout: float | None = None) -> None:
        """The pool that feeds us is closed by its owner."""
        if self._telling is not None:
            self._telling.cancel()

    # ---------------------------------------------------------------- requests

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Step 1 of docs/architecture.md: take a rendered request. The port routes it (step 2)."""
        if request.abort_immediately:
            return
        failpoints.hit("frontend.submit")
        strip_transfer_params(request)
        if request.lora_request is not None:
            try:
                await self.adapters.identify(request)
            except PullfillError as exc:
                fault = Fault.REQUEST if isinstance(exc, BadMessage) else Fault.WORKERS
                self.failed(request.request_id, str(exc), fault)
            if request.request_id not in self._processor.request_states:
                return  # it has failed, or was aborted meanwhile
        if self._config.watermark_config is None:
            # vLLM 0.31 leaves True in all requests, and such a request does not migrate.
            request.sampling_params.watermarking = False
        self.port.submit(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        # vLLM's task that reads outputs finds stop strings. Other tasks abort for clients.
        self.port.abort(request_ids, answered=asyncio.current_task() is self._reader)

    async def get_output_async(self) -> EngineCoreOutputs:
        self._reader = asyncio.current_task()
        return await self._queue.get()

    def dp_engines_running(self) -> bool:
        return bool(self._processor.has_unfinished_requests())

    # ---------------------------------------------------------------- called by the port

    def outputs(self, instance_id: str, outputs: EngineCoreOutputs) -> None:
        """Take outputs of one worker, only of requests that are still at it."""
        outputs.engine_index = 0
        if outputs.scheduler_stats is not None:
            self._set_levels(outputs.scheduler_stats)
        self._queue.put_nowait(outputs)

    def loaded(self, instance_id: str, load: LoadReport) -> None:
        """A worker has said what it has to do. Every frontend hears it, and only one of them what a
        step has counted."""
        self._loads[instance_id] = load
        self._tell_levels_soon()

    def _tell_levels_soon(self) -> None:
        """Not with the next outputs: an idle worker sends none."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(LEVELS_S, self._tell_levels)

    def _tell_levels(self) -> None:
        self._telling, stats = None, SchedulerStats()
        self._set_levels(stats)
        self._queue.put_nowait(EngineCoreOutputs(scheduler_stats=stats))

    def _set_levels(self, stats: Any) -> None:
        """Set the levels in SchedulerStats to those of all workers: vLLM's gauges show one
        engine."""
        loads = self._loads.values()
        stats.num_running_reqs = sum(load.running for load in loads)
        stats.num_waiting_reqs = sum(load.waiting for load in loads)
        stats.num_skipped_waiting_reqs, stats.num_kv_fetch_reqs_by_stage = 0, {}
        blocks = ((load.active_blocks, load.free_blocks) for load in loads)
        used = [active / max(1, active + free) for active, free in blocks]
        stats.kv_cache_usage = sum(used) / max(1, len(used))

    def failed(self, request_id: str, message: str, fault: Fault = Fault.WORKERS) -> None:
        """End a request that cannot be finished. message: for the user."""
        state = self._processor.request_states.get(request_id)
        if state is None:
            return
        queue, parent = state.queue, state.parent_req
        # With n > 1 the choices are one answer: what is left of the others goes too.
        rest = self._processor.abort_requests(
            [request_id if parent is None else parent.request_id], internal=True
        )
        # `AsyncLLM.generate` replaces most other errors.
        queue.put(InputStreamError(failure(message, fault)))
        self.port.abort([other for other in rest if other != request_id])

    def joined(self, welcome: DecodeWelcome) -> None:
        """A worker takes requests now."""
        self._lens[welcome.decode_instance] = welcome.max_model_len
        self._set_max_model_len()
        cache = self._config.cache_config
        cache.block_size = welcome.block_size
        cache.num_gpu_blocks = welcome.num_gpu_blocks
        self.adapters.joined()

    def left(self, instance_id: str) -> None:
        """A worker is gone."""
        self._lens.pop(instance_id, None)
        self._set_max_model_len()
        if self._loads.pop(instance_id, None) is not None:
            self._tell_levels_soon()

    def _set_max_model_len(self) -> None:
        """Check prompts against the smallest worker: it may have fitted the limit to its memory."""
        model = self._config.model_config
        least = min([self._own_len, *self._lens.values()])
        if least != model.max_model_len:
            _log.info("max_model_len is now %d, the least of ours and of the workers", least)
            model.max_model_len = least
            for name in _CACHED_LIMITS:
                self._renderer.__dict__.pop(name, None)

    # ---------------------------------------------------------------- utilities
    # vLLM calls its other ones in its development mode only (VLLM_SERVER_DEV_MODE).

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return _TASKS

    async def _all(self, method: str, *args: Any, slow: bool = False) -> list[Any]:
        timeout = _SLOW * UTILITY_TIMEOUT_S if slow else UTILITY_TIMEOUT_S
        try:
            return await self.port.call(method, args, timeout)
        except PeerUnavailable as exc:
            raise failure(str(exc), Fault.WORKERS) from None

    async def reset_mm_cache_async(self) -> None:
        await self._all("reset_mm_cache")

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return all(await self._all("reset_prefix_cache", reset_running_requests, reset_connector))

    async def reset_encoder_cache_async(self) -> None:
        await self._all("reset_encoder_cache")

    async def profile_async(self, is_start: bool = True, *args: Any) -> None:
        await self._all("profile", is_start, *args, slow=True)

    async def add_lora_async(self, lora_request: Any) -> bool:
        try:
            await self.adapters.add(lora_request)
        except PullfillError as exc:
            raise failure(str(exc), Fault.WORKERS) from None
        return True
