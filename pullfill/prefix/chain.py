"""Names of blocks: a hash over the tokens of a prompt up to the end of each block.

The hash of a block is BLAKE2b of the hash of the block before it and its own tokens. So equal
hashes mean equal prompts up to there, but for chance.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

# Among 1M blocks, two of 8 bytes collide once in 37 million cases. A collision sends a request to a
# worker that lacks its blocks, which then computes them. It never changes an answer.
_BYTES = 8


def root(cache_salt: str | None, lora: str | None, block_size: int) -> int:
    """The parent of a prompt's first block.

    Prompts share hashes only if all three are equal. A missing salt differs from an empty one."""
    fields = [struct.pack("<Q", block_size)]
    for value in (cache_salt, lora):
        # Each field says whether it is there and how long it is, so that no two lists of fields
        # have the same bytes.
        encoded = b"" if value is None else value.encode("utf-8", "surrogatepass")
        fields.append(struct.pack("<?Q", value is not None, len(encoded)) + encoded)
    person = b"pullfill-prefix2"
    return int.from_bytes(blake2b(b"".join(fields), digest_size=_BYTES, person=person).digest())


def extend(parent: int, tokens: bytes, block_size: int) -> list[int]:
    """The hashes of the full blocks that follow `parent`, about 1 us for each.

    parent: hash of the last block before these tokens, or `root` for the first block.
    tokens: little-endian u32. Those of a last block that is not full are ignored."""
    size, found = 4 * block_size, list[int]()
    state = parent.to_bytes(_BYTES)
    for start in range(0, len(tokens) - size + 1, size):
        state = blake2b(state + tokens[start : start + size], digest_size=_BYTES).digest()
        found.append(int.from_bytes(state))
    return found
