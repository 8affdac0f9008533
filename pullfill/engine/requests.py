"""Makes vLLM's engine requests, so that rooms need not import vLLM.

`prepare` makes the Request that a scheduler takes. For a prompt of 128k tokens that is 40 ms of
Python, most of it block hashes, and each hash holds the GIL. So `prepare` is a generator that works
in short slices. Its caller can let the engine thread run in between.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Sequence
from functools import cache
from typing import Any

from pullfill.engine.heap import untrack
from pullfill.wire import u32

_SLICE = 1024
"""Prompt tokens in one slice: 0.1 to 0.3 ms."""
TRACKED = 256
"""Longer prompts, in tokens, are kept from the garbage collector (`untrack`). For shorter
ones that costs more than it saves."""


PREFILL_CLIENT = -2
"""The client index of the outputs of a `prefill_request`. Frontends have other ones."""


def prefill_request(
    request_id: str,
    token_ids: Sequence[int],
    *,
    cache_salt: str | None,
    priority: int,
    arrival_time: float,
    lora_request: Any = None,
    mm_features: Sequence[Any] = (),
) -> Any:
    """An EngineCoreRequest that computes the KV of `token_ids` and samples one token, which
    nobody reads. Sampling parameters of the user never come here."""
    return _request(
        request_id, token_ids, arrival_time, cache_salt=cache_salt, priority=priority,
        lora_request=lora_request, mm_features=mm_features, client_index=PREFILL_CLIENT,
    )  # fmt: skip


def trial_request(
    request_id: str, token_ids: Sequence[int], *, cache_salt: str, client: int, logprobs: int | None
) -> Any:
    """Return an EngineCoreRequest for the self-check. It samples one token.

    client: the client index of its outputs.
    logprobs: how many of the most likely tokens get a log probability."""
    return _request(
        request_id, token_ids, time.time(), logprobs, cache_salt=cache_salt, client_index=client
    )


def _request(
    request_id: str,
    token_ids: Sequence[int],
    arrival_time: float,
    logprobs: int | None = None,
    lora_request: Any = None,
    mm_features: Sequence[Any] = (),
    **fields: Any,
) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        mm_features=list(mm_features) or None,
        sampling_params=copy.copy(_one_token(logprobs)),
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=lora_request,
        data_parallel_rank=None,
        **fields,
    )


@cache
def _one_token(logprobs: int | None) -> Any:
    """SamplingParams of these requests. Made once: vLLM checks all their fields."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs
    )


def is_error(output: Any) -> bool:
    """Whether an EngineCoreOutput ends its request with an engine error."""
    from vllm.v1.engine import FinishReason

    return bool(output.finish_reason == FinishReason.ERROR)


class _Head:
    """Shows the first `num_tokens` tokens of a vLLM Request."""

    __slots__ = ("_request", "num_tokens")

    def __init__(self, request: Any) -> None:
        self._request = request
        self.num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Unhashed:
    """Shows an EngineCore that hashes nothing. The EngineCore itself stays as it is, because the
    engine thread may make a Request at the same time."""

    request_block_hasher = None

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def prepare(core: Any, request: Any, tokens: memoryview) -> Generator[None, None, Any]:
    """Make vLLM's Request with all its block hashes, slice by slice. The generator returns it.

    core: vLLM's EngineCore.
    request: the EngineCoreRequest without its prompt.
    tokens: the prompt as u32.
    """
    if 0 < len(tokens) <= 4 * _SLICE:
        request.prompt_token_ids = u32.unpack(tokens)
        made, _ = core.preprocess_add_request(request)
        if len(tokens) > 4 * TRACKED:
            for plain in (request.prompt_token_ids, made._all_token_ids, made.block_hashes):
                untrack(plain)
        return made
    if tokens:
        request.prompt_token_ids = []
        untrack(request.prompt_token_ids)
        for piece in u32.pieces(tokens, _SLICE):
            request.prompt_token_ids += piece
            yield
    hasher = core.request_block_hasher
    made, _ = core.preprocess_add_request.__func__(_Unhashed(core), request)
    untrack(made._all_token_ids)
    untrack(made.block_hashes)
    yield
    if hasher is not None:
        made._block_hasher = hasher
        head = _Head(made)
        while head.num_tokens < made.num_tokens:
            head.num_tokens = min(head.num_tokens + _SLICE, made.num_tokens)
            made.block_hashes += hasher(head)
            yield
    return made
