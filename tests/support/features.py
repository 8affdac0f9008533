"""vLLM's multimodal inputs, made of zeros."""

from __future__ import annotations

from typing import Any


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
