"""vLLM's multimodal inputs, and stand-ins for them that need no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def stand_in(offset: int, length: int, nbytes: int = 300) -> Any:
    """As much of a MultiModalFeatureSpec as decides whether it may go. 0 bytes: without data."""
    elem = SimpleNamespace(data=SimpleNamespace(nbytes=nbytes))
    return SimpleNamespace(
        data={"pixels": elem} if nbytes else None,
        mm_position=SimpleNamespace(offset=offset, length=length),
    )


def feature(offset: int, length: int, *, modality: str = "image", nbytes: int = 300) -> Any:
    """A MultiModalFeatureSpec with `nbytes` bytes of data. 0: vLLM has left the data out."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    pixels = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    elem = MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem({"pixels": elem}) if nbytes else None,
        modality=modality,
        identifier=f"{modality}-{offset}",
        mm_position=PlaceholderRange(offset=offset, length=length),
        mm_hash=f"{modality}-{offset}",
    )
