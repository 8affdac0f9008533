"""How much two prefills of the same tokens differ, and how much rounding can explain.

KV is compared as numbers, block by block and layer by layer. If the same tokens are computed in
other steps, or by another kernel, only the last digits differ. The measure is the Euclidean norm of
the difference, divided by the norm of the local KV.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pullfill.engine.groups import Groups

# One row of bytes for each block. A row holds the block's layers, one after another.
Pages = NDArray[np.uint8]

# The difference if a value is not a number.
WORST = 1e9

_KV_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
_FP8_TOLERANCE = 0.2
_LOGPROB_TOLERANCE = {"float32": 1e-2, "float16": 0.25, "bfloat16": 0.5}


def kv_tolerance(dtype: str) -> float:
    """The largest relative difference that rounding explains. dtype: vLLM's name."""
    return _KV_TOLERANCE.get(dtype, _FP8_TOLERANCE)


def logprob_tolerance(model_dtype: str) -> float:
    """The largest absolute difference that rounding explains."""
    return _LOGPROB_TOLERANCE.get(model_dtype, _LOGPROB_TOLERANCE["bfloat16"])


def readable(dtype: str) -> bool:
    """Whether `kv_difference` can compare KV of this type."""
    return _numbers(np.zeros((1, 4), np.uint8), dtype) is not None


def kv_difference(local: Pages, remote: Pages, dtype: str, layers: int) -> float | None:
    """The largest difference of a block in a layer. None for a dtype that this cannot read."""
    ours, theirs = _numbers(local, dtype), _numbers(remote, dtype)
    if ours is None or theirs is None:
        return None
    shape = (len(local) * layers, -1)
    ours, theirs = ours.reshape(shape), theirs.reshape(shape)
    scale = np.maximum(np.linalg.norm(ours, axis=1), np.finfo(np.float32).tiny)
    return _finite(float(np.max(np.linalg.norm(theirs - ours, axis=1) / scale)))


def of_groups(local: Pages, remote: Pages, dtype: str, layers: int, groups: Groups) -> float | None:
    """The largest difference of a block in a layer, over all KV cache groups. None: see above.

    A state is compared part by part, because its parts may have other types than KV.

    local, remote: as many blocks of each group, one group after another.
    layers: number of layers that a block has memory for."""
    if not any(groups.states):
        return kv_difference(local, remote, dtype, layers)
    found: list[float | None] = []
    pairs = zip(*(np.split(pages, len(groups.states)) for pages in (local, remote)), strict=True)
    for state, pair in zip(groups.states, pairs, strict=True):
        ours, theirs = (pages.reshape(len(pages) * layers, -1) for pages in pair)
        if not state:
            found.append(kv_difference(ours, theirs, dtype, 1))
        at = 0
        for kind, nbytes in state:
            part = slice(at, at := at + nbytes)
            ours_part, theirs_part = (
                np.ascontiguousarray(pages[:, part]) for pages in (ours, theirs)
            )
            found.append(kv_difference(ours_part, theirs_part, kind, 1))
    return None if None in found else max(value for value in found if value is not None)


def logprob_difference(local: Mapping[int, float], remote: Mapping[int, float]) -> float:
    """The largest difference of a log probability, over the tokens that both prefills list.

    WORST when the two lists share no token.
    """
    shared = [abs(local[token] - remote[token]) for token in local.keys() & remote.keys()]
    return _finite(max(shared)) if shared else WORST


def _finite(value: float) -> float:
    return min(value, WORST) if np.isfinite(value) else WORST


def _numbers(pages: Pages, dtype: str) -> NDArray[np.float32] | None:
    if dtype in ("float32", "float16"):
        return pages.view(dtype).astype(np.float32)
    if dtype == "bfloat16":
        return (pages.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp8_e5m2":
        return (pages.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype in ("fp8", "fp8_e4m3"):
        return _E4M3[pages]
    return None


def _e4m3() -> NDArray[np.float32]:
    """The value of each byte in float8 e4m3fn: sign, 4 bits of exponent, 3 of mantissa."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


_E4M3 = _e4m3()
