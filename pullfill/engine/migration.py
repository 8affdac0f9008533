"""Request migration: another decode worker goes on with an answer whose worker was lost.

`migration_request` makes the request for the other worker. The tokens that are out become the end
of its prompt. Then the next token of a greedy answer is the same as without the loss, and that of a
sampled answer comes from the same distribution. `why_not` finds requests of which that is not true.
`fingerprint` tells requests apart that make an engine compute something else.

Pure functions over vLLM's structs. No vLLM import here.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pullfill.engine.request_limits import TARGET_HEADERS
from pullfill.wire import u32

# vLLM's own bound: a lower temperature means argmax.
_GREEDY_BELOW = 1e-5

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    # field: (values with which it does nothing, why other values rule a migration out)
    "structured_outputs": ((None,), "the state of its structured output is lost"),
    "presence_penalty": ((0, None), "its presence penalty counts output tokens only"),
    "frequency_penalty": ((0, None), "its frequency penalty counts output tokens only"),
    "repetition_detection": ((None,), "its repetition detection looks at output tokens only"),
    "thinking_token_budget": ((None,), "how much of its thinking budget is spent is lost"),
    "watermarking": ((None, False), "its watermark depends on where the output begins"),
    "trace_decode_token_ids": ((None,), "it replays given tokens from the first one"),
    "n": ((1,), "it is one of several choices (n > 1)"),
}
_PROMPT_LOGPROBS = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")
_ADJUSTED = {
    "max_tokens", "min_tokens", *_PROMPT_LOGPROBS, "skip_reading_prefix_cache",
}  # fmt: skip
_CHECKED = {"seed", "temperature", "bad_words", "_bad_words_token_ids", "extra_args"}
# What vLLM's frontend does with the tokens, seeing one uninterrupted answer. And about the object.
_OF_THE_FRONTEND = {
    "stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "output_text_buffer_length", "stream_interval",
    "skip_clone",
}  # fmt: skip
_WITHOUT_HISTORY = _OF_THE_FRONTEND | {
    # The same for each token, or a function of prompt and output together.
    "repetition_penalty", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids",
    "stop_token_ids", "ignore_eos", "_eos_token_id", "_all_stop_token_ids", "logprobs",
    "logprob_token_ids", "flat_logprobs",
    # Reported only.
    "_watermarking_skipped", "routed_experts_prompt_start",
}  # fmt: skip
# Every field of SamplingParams that this module was written for. If the installed vLLM has more, no
# request migrates, because a new one may matter (`why_never`). A migration is not exact if the
# answer depends on which tokens are prompt and which are output, or on state that died with the
# worker.
TOUCHED = _NEUTRAL.keys() | _ADJUSTED | _CHECKED
FIELDS = TOUCHED | _WITHOUT_HISTORY


def why_never(args: Any, fields: Iterable[str]) -> str:
    """Return why no migration is exact. Empty: nothing prevents it.

    args: vLLM's parsed server flags.
    fields: those of the installed SamplingParams."""
    if getattr(args, "logits_processors", None):
        return "the engine runs logits processors we do not know (--logits-processors)"
    if getattr(args, "enable_return_routed_experts", False):
        return "routed experts are returned by position (--enable-return-routed-experts)"
    if unknown := sorted(set(fields) - FIELDS):
        return f"this vLLM has sampling parameters we do not know ({', '.join(unknown)})"
    return ""


def why_not(request: Any, tokens: Sequence[int]) -> str:
    """Return why an answer cannot migrate exactly. Empty: it can.

    request: the EngineCoreRequest as it was first sent.
    tokens: those that are out.
    """
    params = request.sampling_params
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "its prompt is not made of tokens only"
    if choice_of(request.request_id, request.external_req_id):
        return _NEUTRAL["n"][1]
    for field, (neutral, reason) in _NEUTRAL.items():
        if getattr(params, field) not in neutral:
            return reason
    if (params.extra_args or {}).keys() - set(TARGET_HEADERS.values()):
        return "it has arguments for logits processors we do not know"
    if params.seed is not None and params.temperature >= _GREEDY_BELOW:
        return "it is sampled with a seed, and the state of the generator is lost"
    if any(_begun(word, tokens) for word in params.bad_words_token_ids or ()):
        return "one of its bad words is half said"
    if params.max_tokens <= len(tokens):
        return "all its tokens are out, but not why it ended"
    return ""


def migration_request(request: Any, tokens: Sequence[int]) -> Any:
    """Return a new EngineCoreRequest that goes on after `tokens`. Copies the prompt.

    Call it only if `why_not` returns "". `request` is not changed."""
    params = copy.copy(request.sampling_params)
    params.max_tokens -= len(tokens)
    params.min_tokens = max(0, params.min_tokens - len(tokens))
    if any(getattr(params, name) is not None for name in _PROMPT_LOGPROBS):
        # They came with the first token. They were also why the prefix cache was not read.
        for name in (*_PROMPT_LOGPROBS, "skip_reading_prefix_cache"):
            setattr(params, name, None)
    result = copy.copy(request)
    result.prompt_token_ids = [*request.prompt_token_ids, *tokens]
    result.sampling_params = params
    return result


def room_for(request: Any) -> int:
    """Return how many tokens prompt and answer may have together. 0: not known."""
    if request.prompt_token_ids is None:
        return 0
    return len(request.prompt_token_ids) + int(request.sampling_params.max_tokens)


def choice_of(request_id: str, external_id: str) -> str:
    """Return which of n > 1 choices a request is. Empty: it is not one of several.

    For `2_cmpl-x-0-1234abcd` of `cmpl-x-0` it is `2`."""
    # With n > 1 vLLM makes one request for each choice, each with n = 1.
    choice, _, rest = request_id.partition("_")
    if not choice.isdigit() or request_id.startswith(external_id):
        return ""
    return choice if rest.startswith(external_id) else ""


def _begun(word: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether `tokens` end with a beginning of `word`."""
    # vLLM looks for the word's beginning among output tokens only, and these become prompt.
    return any(list(tokens[-n:]) == list(word[:n]) for n in range(1, len(word)))


# Bytes. Short, because people type the fingerprint.
_SIZE = 8


def fingerprint(request: Any) -> str:
    """Return 16 hex digits for an EngineCoreRequest. Costs one pass over the prompt.

    Two requests share it when their prompts and what the engine is asked to do with them are equal.
    A request that its user sends again has the same, whatever its ids and whether it is streamed.
    So do the choices of one answer (n > 1)."""
    hashed = hashlib.blake2b(digest_size=_SIZE)

    def add(name: str, data: bytes | memoryview) -> None:
        hashed.update(f"{name}:{len(data)}:".encode())
        hashed.update(data)

    tokens = request.prompt_token_ids
    if tokens is not None:
        add("tokens", _tokens(tokens))
    if request.prompt_embeds is not None:
        import torch

        add("embeds", request.prompt_embeds.contiguous().view(torch.uint8).numpy().tobytes())
    for feature in request.mm_features or ():
        where = feature.mm_position
        add("feature", f"{feature.identifier} {where.offset} {where.length}".encode())
    if request.lora_request is not None:
        add("lora", f"{request.lora_request.lora_name} {request.lora_request.lora_path}".encode())
    add("sampling", _normal(_sampling(request)))
    return hashed.hexdigest()


def _tokens(tokens: Any) -> bytes:
    try:
        return u32.pack(tokens)
    except (OverflowError, ValueError, TypeError):
        return repr(tokens).encode()  # no valid token ids, but the request still gets a name


def _sampling(request: Any) -> dict[str, Any]:
    values = msgspec.structs.asdict(request.sampling_params)
    for name in (*_OF_THE_FRONTEND, "n"):  # n: how many choices there are besides this one
        values.pop(name, None)
    choice = choice_of(request.request_id, request.external_req_id)
    if choice and values.get("seed") is not None:
        values["seed"] -= int(choice)  # vLLM counts the seed up from choice to choice
    return values


def _normal(value: Any) -> bytes:
    """The same bytes for equal values, in whatever order their keys came."""
    plain = msgspec.to_builtins(value, enc_hook=repr, str_keys=True, order="sorted")
    return msgspec.json.encode(plain)
