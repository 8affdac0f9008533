"""Names of blocks: a hash over the raw tokens of a prompt up to the end of each block.

The hash of a block is SipHash-1-3 of its token bytes, keyed with the hash of the block before it.
So 64 bits are all that is needed to go on, and equal hashes mean equal prompts up to there, but for
chance: among 1M blocks two collide once in 37 million cases. A collision sends a request to a
worker that lacks its blocks, which then computes them; it never changes an answer.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pullfill.prefix.kernels import sip_chain

HashArray: TypeAlias = NDArray[np.uint64]
Hashes: TypeAlias = "bytes | memoryview | array[int] | HashArray"
"""Block hashes: little-endian u64, one after the other."""
STATE_BYTES = 8
_KEY = 0x70756C6C66696C6C
"""The second half of the SipHash key: "pullfill"."""


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
