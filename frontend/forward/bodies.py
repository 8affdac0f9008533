"""Request bodies: the one-token prefill stage, and what the policies need of a prompt.

Nothing is tokenized here. The length of a text is taken as a quarter of its UTF-8 bytes, and its
blocks are hashed over those bytes, four of them for one token. So equal beginnings have equal
hashes, which is all that the policy `kv` needs. The hashes mean nothing to a vLLM server.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from pullfill.prefix import chain

BLOCK = 64
"""Tokens of a hashed block."""
TWO_STAGES = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths whose requests may have a prefill stage of their own."""
_DROPPED = (
    "stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "best_of", "n",
    "echo", "return_token_ids", "return_tokens_as_token_ids", "stop", "stop_token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: its length, estimated for text. hashes: of its whole blocks (prefix/chain.py)."""

    tokens: int
    hashes: chain.HashArray


def whole_because(path: str, body: dict[str, Any] | None) -> str:
    """Return why a request has no prefill stage and goes to a decode server as it came.

    Empty: it can have one. Parameters of a prefill are for one prompt and one choice: with more,
    vLLM would give those of the first to all."""
    if path not in TWO_STAGES:
        return "path"
    if body is None:
        return "not_json"
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return "choices"
    if body.get("use_beam_search"):
        return "beam_search"
    # KV that comes from elsewhere has no log probabilities of the prompt's tokens.
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo"):
        return "echo"
    if path == "/v1/completions":
        prompt = body.get("prompt")
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        if isinstance(prompt, list) and not all(type(item) is int for item in prompt):
            return "prompts"
    return ""


def prefill_body(body: dict[str, Any], kv: dict[str, Any]) -> bytes:
    """Return the body of the prefill stage: one token, not streamed.

    A token that ends the answer is ignored here. Most connectors give no KV of a prompt whose
    answer has ended by itself: MoRI-IO, Mooncake, and NIXL in older releases."""
    changed = {key: value for key, value in body.items() if key not in _DROPPED}
    changed |= {"stream": False, "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": kv}
    if "max_completion_tokens" in body:
        changed["max_completion_tokens"] = 1
    return msgspec.json.encode(changed)


def decode_body(body: dict[str, Any], kv: dict[str, Any] | None) -> bytes:
    """Return the body of the decode stage. Parameters of the client's are dropped.

    kv: None: it has no prefill stage."""
    changed = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    if kv is not None:
        changed["kv_transfer_params"] = kv
    return msgspec.json.encode(changed)


def prompt_of(body: dict[str, Any] | None) -> Prompt:
    """Return what the policies need of a prompt. It never fails: an odd prompt has no blocks."""
    body = body or {}
    ids = body.get("prompt")
    if isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        tokens = array("I", ids).tobytes()
    else:
        tokens = _text(body).encode("utf-8", "surrogatepass")
    count = max(1, len(tokens) // 4)
    salt = body.get("cache_salt")
    model = body.get("model")
    root = chain.root(
        salt if isinstance(salt, str) else None, model if isinstance(model, str) else None, BLOCK
    )
    return Prompt(count, chain.chain(root, tokens[: count * 4], BLOCK))


def _text(body: dict[str, Any]) -> str:
    """The prompt as text. A longer conversation begins with the text of a shorter one."""
    messages = body.get("messages")
    if isinstance(messages, list):
        tools = body.get("tools")
        head = msgspec.json.encode(tools).decode() if tools else ""
        return head + "".join(msgspec.json.encode(message).decode() for message in messages)
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()
