"""Names of blocks: a hash over the raw tokens of a prompt up to the end of each block.

The hash of a block is SipHash-1-3 of its token bytes, keyed with the hash of the block before it.
So 64 bits are all that is needed to go on, and equal hashes mean equal prompts up to there, but for
chance: among 1M blocks two collide once in 37 million cases. A collision sends a request to a
worker that lacks its blocks, which then computes them; it never changes an answer.

numba, on which vLLM depends, compiles each function when this module is imported for the first time
on a machine, and keeps the result beside this file, or in the user's cache folder. So import it
while the process starts: nothing is compiled later, on an event loop.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
from llvmlite.binding import ffi
from numba import types
from numpy.typing import NDArray

HashArray: TypeAlias = NDArray[np.uint64]
# Block hashes: little-endian u64, one after the other.
Hashes: TypeAlias = "bytes | memoryview | array[int] | HashArray"
STATE_BYTES = 8
# The second half of the SipHash key: "pullfill".
_KEY = 0x70756C6C66696C6C


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


def hide(library: type) -> None:
    """Have instances of a class like llvmlite's `_lib_wrapper` lack the names that Python gives."""
    # vLLM looks for its Triton kernels in every object of every module (`_rebind_kernels` in
    # vllm/triton_utils/dispatcher.py). It takes the `__dict__` of each object that has one. The
    # object `lib` of llvmlite, on which numba rests, answers to every name with a function of its
    # library. So it seems to have a `__dict__`, and the CPU engine would not start.
    find: Any = library.__getattr__  # type: ignore[attr-defined]

    def find_function(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function  # type: ignore[attr-defined]


hide(type(ffi.lib))


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


def root(cache_salt: str | None, lora: str | None, block_size: int) -> bytes:
    """The 8 bytes from which the hashes of a prompt start.

    Prompts share hashes only if all three are equal. A missing salt differs from an empty one.
    Raises ValueError if block_size is not positive."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    fields = [struct.pack("<Q", block_size)]
    for value in (cache_salt, lora):
        # Each field says whether it is there and how long it is, so that no two lists of fields
        # have the same bytes.
        encoded = b"" if value is None else value.encode("utf-8", "surrogatepass")
        fields.append(struct.pack("<?Q", value is not None, len(encoded)) + encoded)
    person = b"pullfill-prefix1"
    return hashlib.blake2b(b"".join(fields), digest_size=STATE_BYTES, person=person).digest()


def chain(root: bytes, tokens: bytes | memoryview, block_size: int) -> HashArray:
    """The hash of each full block. Tokens of a last block that is not full are ignored.

    root: from `root`. tokens: little-endian u32. Raises ValueError if root has not 8 bytes."""
    return extend(state_of(root), tokens, block_size)


def extend(parent: int, tokens: bytes | memoryview, block_size: int) -> HashArray:
    """The hashes of the full blocks that follow one whose hash is `parent`.

    parent: hash of the last block before these tokens, or `state_of(root)` for the first."""
    words = np.frombuffer(tokens, np.uint32, count=len(tokens) // 4)
    if not words.flags.aligned:  # numba reads whole words
        words = words.copy()
    out = np.empty(len(words) // block_size, np.uint64)
    sip_chain(parent, _KEY, words, block_size, out)
    return out


def state_of(root: bytes) -> int:
    """What `extend` takes as the parent of a prompt's first block."""
    if len(root) != STATE_BYTES:
        raise ValueError(f"a root has {STATE_BYTES} bytes, not {len(root)}")
    return int.from_bytes(root, "little")


def as_array(hashes: Hashes) -> HashArray:
    """View hashes as u64[n]. Raises ValueError if they are not whole u64."""
    found = np.frombuffer(hashes, np.uint64)
    return found if found.flags.aligned else found.copy()


extend(0, bytes(4), 1)  # numba takes milliseconds for the first call
