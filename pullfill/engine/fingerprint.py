"""A fingerprint of a request, equal for all requests that make an engine compute the same.

Two requests share a fingerprint when their prompts and what the engine is asked to do with them are
equal. A request that is sent again by its user has the fingerprint of the first one, whatever its
ids and whether it is streamed. The choices of one answer (n > 1) share a fingerprint too.

A pure function over vLLM's structs. No vLLM import here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pullfill.engine.migration import choice_of
from pullfill.wire import u32

_NOT_OF_THE_ENGINE = frozenset({
    # What vLLM's frontend does with the tokens.
    "stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "output_text_buffer_length", "stream_interval",
    # About the object itself, and how many choices there are besides this one.
    "skip_clone", "n",
})  # fmt: skip
_SIZE = 8
"""Bytes. Short, because people type the fingerprint."""


def fingerprint(request: Any) -> str:
    """Return 16 hex digits for an EngineCoreRequest. Costs one pass over the prompt."""
    hashed = hashlib.blake2b(digest_size=_SIZE)

    def add(name: str, data: bytes | memoryview) -> None:
        hashed.update(f"{name}:{len(data)}:".encode())
        hashed.update(data)

    tokens = request.prompt_token_ids
    if tokens is not None:
        add("tokens", _tokens(tokens))
    if request.prompt_embeds is not None:
        add("embeds", _tensor(request.prompt_embeds))
    for feature in request.mm_features or ():
        where = feature.mm_position
        add("feature", f"{feature.identifier} {where.offset} {where.length}".encode())
    if request.lora_request is not None:
        add("lora", f"{request.lora_request.lora_name} {request.lora_request.lora_path}".encode())
    if request.sampling_params is not None:
        add("sampling", _fields(request, request.sampling_params))
    if request.pooling_params is not None:
        add("pooling", _normal(request.pooling_params))
    return hashed.hexdigest()


def _tokens(tokens: Any) -> bytes:
    try:
        return u32.pack(tokens)
    except (OverflowError, ValueError, TypeError):
        return repr(tokens).encode()  # no valid token ids, but the request still gets a name


def _tensor(tensor: Any) -> bytes:
    import torch

    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + bytes(raw)


def _fields(request: Any, params: Any) -> bytes:
    values: dict[str, Any] = {
        name: sorted(value) if isinstance(value, set) else value
        for name in params.__struct_fields__
        if name not in _NOT_OF_THE_ENGINE
        for value in (getattr(params, name),)
    }
    choice = choice_of(request.request_id, request.external_req_id)
    if choice and values.get("seed") is not None:
        values["seed"] -= int(choice)  # vLLM counts the seed up from choice to choice
    return _normal(values)


def _normal(value: Any) -> bytes:
    """The same bytes for equal values, in whatever order their keys came."""
    return repr(_sorted(msgspec.to_builtins(value, enc_hook=repr, str_keys=True))).encode()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((key, _sorted(item)) for key, item in value.items())
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value
