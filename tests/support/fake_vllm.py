"""vLLM's engine structs as the wire carries them, and a model of one line, without vLLM.

Field names and order are those of vLLM 0.32; `tests/integration/test_frontend_http.py` proves it by
putting vLLM itself at the other end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from pullfill import wire
from pullfill.wire import PrefixHolder

STOP, LENGTH, ABORT = 0, 1, 2
FIRST_TOKEN = 75
"""26 tokens from here are one printable ASCII character each in the tiny checkpoint."""


class Request(msgspec.Struct, array_like=True, omit_defaults=True):
    """EngineCoreRequest."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: Any
    pooling_params: Any
    arrival_time: float
    lora_request: Any = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Any = None
    resumable: bool = False
    external_req_id: str = ""


class Params(msgspec.Struct, omit_defaults=True):
    """SamplingParams, as far as anybody looks at them."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_detection: Any = None
    structured_outputs: Any = None
    thinking_token_budget: int | None = None
    watermarking: bool | None = None
    trace_decode_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    skip_reading_prefix_cache: bool | None = None


class PrefillStats(msgspec.Struct):
    """What vLLM reports with the first token."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


class Output(msgspec.Struct, array_like=True, omit_defaults=True):
    """EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: Any = None
    prefill_stats: Any = None


class Utility(msgspec.Struct, array_like=True):
    """UtilityOutput; `result` is (type info, value)."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """EngineCoreOutputs."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: Utility | None = None


class PlainCodec:
    """Stands in for `rpc.FrontendCodec`."""

    def encode(self, obj: Any, holder: PrefixHolder | None = None) -> list[bytes]:
        encoded = msgspec.msgpack.encode(obj)
        if not isinstance(obj, Request):
            return [encoded]
        hint = b"" if holder is None else wire.encode(holder)
        return [obj.request_id.encode(), b"", hint, encoded]

    def outputs(self, frames: Sequence[Any]) -> Outputs:
        outputs = wire.decode(frames[0].bytes, Outputs)
        called = outputs.utility_output
        if called is not None and called.result is not None:
            called.result = SimpleNamespace(result=called.result[1])
        return outputs


def request(
    request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **params: Any
) -> Request:
    """A request as the frontend gets it from vLLM. params: fields of `Params`."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=Params(max_tokens=max_tokens, **params),
        pooling_params=None,
        arrival_time=time.time(),
        external_req_id=request_id.rpartition("-")[0] or request_id,
    )


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What every fake worker generates: each token follows from all before it, prompt or output."""
    total, length = sum(prompt), len(prompt)
    tokens = []
    for _ in range(count):
        tokens.append(next_token(total, length))
        total, length = total + tokens[-1], length + 1
    return tokens


def next_token(total: int, length: int) -> int:
    """The token after `length` tokens whose sum is `total`."""
    mixed = (total * 2654435761 + length * 40503) % 2**32
    return FIRST_TOKEN + (mixed >> 16) % 26
