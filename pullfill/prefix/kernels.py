"""The loops of this room, compiled by numba, on which vLLM depends.

numba compiles each function when this module is imported for the first time on a machine and keeps
the result beside this file, or in the user's cache folder where this one is read-only. So import
this module while the process starts: nothing is compiled later, on an event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types

from pullfill.prefix import llvm as llvm

_F = TypeVar("_F", bound=Callable[..., Any])
U64 = types.uint64
I64 = types.int64
READ_U32 = types.Array(types.uint32, 1, "C", readonly=True)
READ_U64 = types.Array(types.uint64, 1, "C", readonly=True)
ARRAY_U64 = types.Array(types.uint64, 1, "C")
ARRAY_I64 = types.Array(types.int64, 1, "C")
READ_U8 = types.Array(types.uint8, 1, "C", readonly=True)


def compiled(*signature: Any) -> Callable[[_F], _F]:
    """Compile a function for these argument types, now."""

    def decorate(function: _F) -> _F:
        try:
            return numba.njit([signature], cache=True)(function)  # type: ignore[no-any-return]
        except RuntimeError:  # no folder for the cache can be written
            return numba.njit([signature])(function)  # type: ignore[no-any-return]

    return decorate


def helper(function: _F) -> _F:
    """Compile a function into those that call it. They must be in the same file: numba looks only
    at that file when it decides whether what it compiled before is still good."""
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)  # type: ignore[no-any-return]


@compiled(U64, U64, READ_U32, I64, ARRAY_U64)
def sip_chain(parent: Any, key: Any, words: Any, per_block: int, out: Any) -> None:
    """out[i] = SipHash-1-3 of block i with the key (out[i - 1], key), and `parent` before the
    first. words: u32[>= len(out) * per_block]."""
    whole = per_block // 2
    length = np.uint64(4 * per_block) << np.uint64(56)
    for block in range(len(out)):
        base = block * per_block
        v0 = parent ^ np.uint64(0x736F6D6570736575)
        v1 = key ^ np.uint64(0x646F72616E646F6D)
        v2 = parent ^ np.uint64(0x6C7967656E657261)
        v3 = key ^ np.uint64(0x7465646279746573)
        # One round for each 8 bytes, one for the rest and the length, three to finish.
        for step in range(whole + 4):
            word = np.uint64(0)
            if step < whole:
                at = base + 2 * step
                word = np.uint64(words[at]) | (np.uint64(words[at + 1]) << np.uint64(32))
            elif step == whole:
                word = length
                if per_block % 2:
                    word |= np.uint64(words[base + per_block - 1])
            elif step == whole + 1:
                v2 ^= np.uint64(0xFF)
            v3 ^= word
            v0 += v1
            v1 = (v1 << np.uint64(13)) | (v1 >> np.uint64(51))
            v1 ^= v0
            v0 = (v0 << np.uint64(32)) | (v0 >> np.uint64(32))
            v2 += v3
            v3 = (v3 << np.uint64(16)) | (v3 >> np.uint64(48))
            v3 ^= v2
            v0 += v3
            v3 = (v3 << np.uint64(21)) | (v3 >> np.uint64(43))
            v3 ^= v0
            v2 += v1
            v1 = (v1 << np.uint64(17)) | (v1 >> np.uint64(47))
            v1 ^= v2
            v2 = (v2 << np.uint64(32)) | (v2 >> np.uint64(32))
            v0 ^= word
        parent = v0 ^ v1 ^ v2 ^ v3
        out[block] = parent
