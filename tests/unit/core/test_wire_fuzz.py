"""Whatever bytes arrive: a message or BadMessage, never another error, never much memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.errors import AuthFailed, BadMessage
from pullfill.net.channel import MAX_FRAME, accept
from pullfill.net.security import ClusterKey
from pullfill.wire import u32
from pullfill.wire.codec import decode, encode
from tests.support import framing
from tests.support.fuzz import EXAMPLES, explore, little_memory, mutated
from tests.support.wire_examples import STRUCTS, example


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_no_number_is_infinite_or_none(bad: float) -> None:
    seen = 0
    for kind in STRUCTS:
        message = example(kind)
        for name in kind.__struct_fields__:
            if isinstance(getattr(message, name), float):
                changed = msgspec.structs.replace(message, **{name: bad})
                with pytest.raises(BadMessage):
                    decode(encode(changed), kind)
                seen += 1
    assert seen > 10


VALID = [encode(example(kind)) for kind in STRUCTS]


@EXAMPLES
def test_decoding(examples: int) -> None:
    kinds: list[Any] = [
        *STRUCTS,
        wire.ToDecode,
        wire.ToPrefill,
        list[str],
        list[wire.ExplainRecord],
    ]

    def check(data: bytes, kind: Any) -> None:
        try:
            message = decode(data, kind)
        except BadMessage:
            return
        for name in getattr(message, "__struct_fields__", ()):
            value = getattr(message, name)
            assert not isinstance(value, float) or math.isfinite(value), name

    explore(examples * 5, check, data=mutated(VALID), kind=st.sampled_from(kinds))


@EXAMPLES
def test_lists_of_ids(examples: int) -> None:
    def check(data: bytes) -> None:
        for parse in (front_wire.decode_ids, front_wire.decode_explain, u32.unpack):
            try:
                parse(data)
            except BadMessage:
                continue
        front_wire.text_of(data)

    explore(examples, check, data=mutated([*VALID, front_wire.encode_list(["a", "b"])]))


STREAMS = st.one_of(
    st.lists(mutated(VALID), max_size=4).map(lambda bodies: b"".join(map(framing.frame, bodies))),
    st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=100)).map(
        lambda t: struct.pack("<I", t[0]) + t[1]
    ),
    st.binary(max_size=50),
)


@EXAMPLES
def test_streams_of_frames(examples: int) -> None:
    async def read_all(data: bytes) -> None:
        channel = framing.ended(data)
        with contextlib.suppress(EOFError, BadMessage):
            while True:
                await channel.read(wire.ToDecode)  # type: ignore[arg-type]

    explore(examples, lambda data: asyncio.run(read_all(data)), data=STREAMS)


@EXAMPLES
def test_nothing_but_the_key_passes_the_handshake(examples: int) -> None:
    async def knock(data: bytes) -> None:
        with pytest.raises((EOFError, BadMessage, AuthFailed)):
            await accept(framing.ended(data), ClusterKey(b"k" * 32))

    explore(examples, lambda data: asyncio.run(knock(data)), data=STREAMS)


@EXAMPLES
def test_nothing_unsealed_passes_for_sealed(examples: int) -> None:
    async def speak(data: bytes) -> None:
        channel = framing.ended(data)
        channel.seal(incoming=b"k" * 32, outgoing=b"k" * 32)
        with pytest.raises((EOFError, BadMessage, AuthFailed)):
            await channel.read(wire.ToDecode)  # type: ignore[arg-type]

    explore(examples, lambda data: asyncio.run(speak(data)), data=STREAMS)


def test_a_length_of_4_gib_takes_no_memory() -> None:
    async def read() -> None:
        for length in (2**32 - 1, MAX_FRAME):
            with pytest.raises((EOFError, BadMessage)):
                await framing.ended(struct.pack("<I", length) + b"x").read(wire.Heartbeat)

    with little_memory(1 << 20):
        asyncio.run(read())
