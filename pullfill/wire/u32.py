"""Lists of token and block ids as raw little-endian u32, the form they travel in."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from pullfill.errors import BadMessage

SIZE = 4


def pack(values: Iterable[int]) -> bytes:
    """Encode as little-endian u32. Raises OverflowError for a value outside u32."""
    out = array("I", values)
    if sys.byteorder == "big":
        out.byteswap()
    return out.tobytes()


def unpack(data: bytes | memoryview) -> list[int]:
    """Raises BadMessage when `data` is not a whole number of u32."""
    if len(data) % 4:
        raise BadMessage(f"{len(data)} bytes are not a list of u32")
    out = array("I")
    out.frombytes(data)
    if sys.byteorder == "big":
        out.byteswap()
    return out.tolist()
