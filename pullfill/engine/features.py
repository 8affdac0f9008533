"""The multimodal inputs of a prompt, from a decode worker to a prefill worker.

vLLM calls an image, video or sound that its processor has prepared a *feature*. A frontend makes
the features, and a decode worker gets them with the request. A job holds only a digest of them,
because a message on the queue must be short. The grant brings the features themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pullfill.errors import BadMessage

# Most bytes of a prompt's features. A frame of the control channel takes twice as many.
MAX_BYTES = 8 << 20


def nbytes(features: Iterable[Any]) -> int:
    """Return the bytes of all tensors of vLLM's `MultiModalFeatureSpec`s."""
    return sum(_nbytes(elem.data) for f in features for elem in (f.data or {}).values())


def _nbytes(data: Any) -> int:
    if isinstance(data, (list, tuple)):
        return sum(map(_nbytes, data))
    return int(getattr(data, "nbytes", 0))


def may_go(features: Sequence[Any], tokens: int) -> bool:
    """Whether a prefill worker that computes the first `tokens` tokens can get these features.

    It needs whole features: placeholders that end before, and the data of each."""
    return (
        all(f.data is not None and _end(f) <= tokens for f in features)
        and nbytes(features) <= MAX_BYTES
    )


def _end(feature: Any) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)


def encode(features: Sequence[Any]) -> tuple[bytes, str]:
    """Return vLLM's encoding of the features, in one piece, and its `digest`."""
    from vllm.v1.serial_utils import MsgpackEncoder

    data = msgspec.msgpack.encode([bytes(part) for part in MsgpackEncoder().encode(features)])
    return data, digest(data)


def decode(data: bytes, tokens: int) -> list[Any]:
    """Return the features of a prompt of `tokens` tokens. Raises BadMessage."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.serial_utils import MsgpackDecoder

    try:
        parts = msgspec.msgpack.decode(data, type=list[bytes])
        features: list[Any] = MsgpackDecoder(list[MultiModalFeatureSpec]).decode(parts)
    except Exception as exc:  # vLLM's hooks raise whatever a malformed part makes them raise
        raise BadMessage(f"unreadable features: {exc}") from exc
    if any(f.data is None or not 0 <= f.mm_position.offset <= _end(f) <= tokens for f in features):
        raise BadMessage("a feature is empty, or is not where the prompt is")
    return features


def digest(data: bytes) -> str:
    """Return what a job says of encoded features. None: the empty string."""
    return hashlib.blake2b(data, digest_size=16).hexdigest() if data else ""


def limits(model_config: Any) -> Any:
    """Return how many features of a modality this engine takes in a prompt, as a function.

    model_config: vLLM's."""
    if not model_config.supports_multimodal_inputs:
        return lambda _modality: 0
    return model_config.get_multimodal_config().get_limit_per_prompt
