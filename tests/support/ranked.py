"""Workers of several ranks without engines: each rank's part of one model's KV, in real memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pullfill.transfer.contract import KvLayout, LocalMemory, Rect
from pullfill.transfer.layout import dense_layout
from tests.support.transfer_rigs import memory_over

PAGE, LAYERS, BLOCKS, HEADS = 64, 3, 8, 4

WHOLE = [Rect(0, 4, 0, LAYERS)]
HALVES = [Rect(0, 2, 0, LAYERS), Rect(2, 2, 0, LAYERS)]
REPLICAS = [Rect(h, 1, 0, LAYERS) for h in (0, 0, 1, 1, 2, 2, 3, 3)]
STAGES = [Rect(0, 4, 0, 1), Rect(0, 4, 1, LAYERS - 1)]
"""Ways to split a model of HEADS KV heads and LAYERS layers over ranks."""


class RankedWorker:
    """The KV memories of the ranks of one worker, with the same content however it is split."""

    def __init__(self, rects: Sequence[Rect], seed: int) -> None:
        self.rects = list(rects)
        self.data: list[NDArray[np.uint8]] = []
        self.memories: list[LocalMemory] = []
        random = np.random.default_rng(seed)
        model = random.integers(0, 255, (LAYERS, BLOCKS, HEADS, PAGE), np.uint8)
        for rect in rects:
            layout = dense_layout(rect.layers, BLOCKS, rect.heads, PAGE)
            # Ranks that share a head hold the same, as after a real prefill.
            data = model[rect.first_layer : rect.end_layer, :, rect.first_head : rect.end_head]
            self.data.append(np.ascontiguousarray(data).reshape(-1))
            memory = memory_over(self.data[-1], layout)
            self.memories.append(
                replace(memory, first_head=rect.first_head, first_layer=rect.first_layer)
            )

    def page(self, rank: int, layer: int, block: int, head: int) -> bytes:
        at: KvLayout = self.memories[rank].layout
        first = layer * at.layer_stride + block * at.block_stride + head * at.head_stride
        return self.data[rank][first : first + PAGE].tobytes()

    def block(self, block: int) -> dict[tuple[int, int], set[bytes]]:
        """(layer, head) of the model → what the ranks that have it hold there."""
        found: dict[tuple[int, int], set[bytes]] = {}
        for rank, rect in enumerate(self.rects):
            for layer in range(rect.layers):
                for head in range(rect.heads):
                    where = (rect.first_layer + layer, rect.first_head + head)
                    found.setdefault(where, set()).add(self.page(rank, layer, block, head))
        return found
