"""Finds out how tokens lie in a page of KV, so that pages can be cut.

Workers with different block sizes exchange pieces of blocks (transfer/pieces.py). Where the bytes
of a piece are in a page is the attention backend's own business. It depends on the processor, too.
So each rank asks its backend: it has a page of its own filled by the code that fills the KV cache
(`do_kv_cache_update`), with numbers that tell which token and which column of K and V they are.

    page of 4 tokens, heads of 2 numbers    k00 k10 k20 k30  k01 k11 k21 k31  v00 v01 v10 v11 ...
    cut at 1 token                          2 rows of 1 number, then 1 row of 2 numbers

Two pages are filled, one of them twice as long. A cut counts only if it is right for both, and if
all pieces of both have their numbers in the same order. A digest of that order is part of the
compatibility record. So workers whose pieces are not the same bytes never exchange KV. A page whose
order is not understood is not cut.

This module knows vLLM's attention layers, and no tokens of any request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pullfill.runtime import log

logger = log.get("engine.page")

Numbers = NDArray[np.int64]
Sections = tuple[tuple[int, int], ...]

_CUT = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""vLLM's kinds of KV cache groups whose blocks may be cut: they keep all blocks of a prompt, or all
from some position on. Other kinds may keep other blocks, or store a block in another way."""
_BASE = 8
"""Each number is written digit by digit, as 1 to 8: every KV cache type holds these exactly."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a page can be cut. Holds plain types only: it is sent between processes.

    tokens: number of tokens of the smallest piece.
    sections: of the page, one after another: the number of rows, and the bytes of such a piece in a
    row.
    order: digest of the sections, and of the order of the numbers in a piece."""

    tokens: int
    sections: Sections
    order: str


Fill = Callable[[Numbers], NDArray[Any]]
"""Fills a page with one number for each token and column. Returns what the page holds then."""


def cut_of(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> Cut | None:
    """Return how the pages of this rank can be cut. None: they cannot, and the log says why."""
    try:
        return _cut_of(vllm_config, kv_cache_config, kv_caches)
    except Exception as exc:  # also from a backend that wants to be called in another way
        logger.info("other workers need the same --block-size, as blocks are not cut: %s", exc)
        return None


def _cut_of(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> Cut:
    """As `cut_of`. Raises ValueError, and whatever the backend raises."""
    specs = {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups}
    if unknown := specs.difference(_CUT):
        raise ValueError(f"nobody knows which blocks of {sorted(unknown)} are kept")
    layers = vllm_config.compilation_config.static_forward_context
    found = [layers[name] for name in kv_caches if name in layers]
    kinds = {(type(layer.impl), getattr(layer, "isa", None)) for layer in found}
    if len(kinds) != 1:
        raise ValueError(f"the model has {len(kinds)} kinds of attention layers")
    layer, cache = found[0], next(iter(kv_caches.values()))
    tokens, width = cache.shape[-2:]
    if cache.device.type != "cpu":
        raise ValueError("the KV cache is not in CPU memory")
    if tokens != vllm_config.cache_config.block_size:
        raise ValueError(f"vLLM splits them into blocks of {tokens} tokens")
    dtype = vllm_config.model_config.dtype
    cut = find(
        lambda numbers: _fill(layer, cache, dtype, numbers), int(tokens), int(width),
        cache.element_size(),
    )  # fmt: skip
    if cut is None:
        raise ValueError("the order of the numbers in a page is not understood")
    return cut


def find(fill: Fill, tokens: int, width: int, itemsize: int) -> Cut | None:
    """Return the finest cut of a page.

    tokens: of the page.
    width: number of columns of K and V of a token."""
    codes = np.array([fill(np.full((tokens, width), digit))[0] for digit in range(1, _BASE + 1)])
    pages = [_places(fill, codes, count, width) for count in (tokens, 2 * tokens)]
    if any(page is None for page in pages):
        return None
    for unit in (size for size in range(1, tokens + 1) if tokens % size == 0):
        sections = _sections(pages[1] // width // unit, 2 * tokens // unit)
        if not sections:
            continue
        pieces = np.concatenate([_pieces(page, sections, unit * width) for page in pages])
        if (pieces == pieces[0]).all():
            in_bytes = tuple((rows, run * itemsize) for rows, run in sections)
            order = hashlib.blake2b(repr(in_bytes).encode() + pieces[0].tobytes(), digest_size=8)
            return Cut(unit, in_bytes, order.hexdigest())
    return None


def _places(fill: Fill, codes: NDArray[Any], tokens: int, width: int) -> Any:
    """Return which number lies where in a page: token * width + column. None: it is not known.

    codes: what a page holds for each digit."""
    numbers = np.arange(tokens * width, dtype=np.int64).reshape(tokens, width)
    places = np.zeros(numbers.size, np.int64)
    scale = 1
    while scale < numbers.size:
        digits = fill(numbers // scale % _BASE + 1)[:, None] == codes
        if digits.shape != (numbers.size, _BASE) or (digits.sum(axis=1) != 1).any():
            return None
        places += np.argmax(digits, axis=1) * scale
        scale *= _BASE
    return places if (np.sort(places) == np.arange(numbers.size)).all() else None


def _sections(pieces: Numbers, count: int) -> Sections:
    """Return rows and run of each section, in numbers. Empty: the page is not made of sections.

    pieces: to which piece each number of the page belongs.
    count: of pieces."""
    found: list[tuple[int, int]] = []
    others = np.append(np.flatnonzero(pieces), len(pieces))  # not of the first piece
    at = 0
    while at < len(pieces):
        run = int(others[np.searchsorted(others, at)]) - at
        row = np.repeat(np.arange(count), run)
        if not run or not np.array_equal(pieces[at : at + count * run], row):
            return ()
        at += count * run
        rows, last = found[-1] if found else (0, 0)
        if last == run:
            found[-1] = rows + 1, run
        else:
            found.append((1, run))
    return tuple(found)


def _pieces(page: Numbers, sections: Sections, size: int) -> Numbers:
    """Return the numbers of each piece in the order of the page, counted from the piece's first.

    size: numbers of a piece."""
    count, parts, at = len(page) // size, [], 0
    for rows, run in sections:
        section = page[at : at + rows * run * count].reshape(rows, count, run)
        parts.append(section.transpose(1, 0, 2).reshape(count, rows * run))
        at += rows * run * count
    return np.concatenate(parts, axis=1) - np.arange(count)[:, None] * size


def _fill(layer: Any, cache: Any, dtype: Any, numbers: Numbers) -> NDArray[Any]:
    """Have vLLM write tokens into a page of its own. Returns the page's numbers as raw integers."""
    import torch

    tokens, width = numbers.shape
    page = torch.zeros((1, 1, tokens, width), dtype=cache.dtype)
    values = torch.from_numpy(numbers).to(dtype)
    slots = torch.arange(tokens)
    # layer: vllm.model_executor.layers.attention.attention
    # layer.impl: vllm.v1.attention.backends.cpu_attn, or vllm.v1.attention.backends.mla.cpu_mla
    if hasattr(layer.impl, "kv_lora_rank"):  # MLA: the latent, and what is rotated
        latent = layer.impl.kv_lora_rank
        layer.impl.do_kv_cache_update(
            values[:, :latent].contiguous(), values[:, None, latent:].contiguous(),
            page[:, 0], slots, layer.impl.kv_cache_dtype, torch.ones(()),
        )  # fmt: skip
    else:
        plain = SimpleNamespace(isa=layer.isa, _k_scale_float=1.0, _v_scale_float=1.0)
        key, value = (part.contiguous() for part in values[:, None].chunk(2, dim=-1))
        layer.impl.do_kv_cache_update(plain, key, value, page, slots)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    numbers_held: NDArray[Any] = page.view(raw).flatten().numpy()
    return numbers_held
