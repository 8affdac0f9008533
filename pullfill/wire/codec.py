"""How structs are encoded between processes, and what decides whether two workers fit.

Encoding is msgpack through msgspec: strict types, no pickle. Each top-level message carries its
version `v`. A reader raises OtherVersion for any other version.

Sizes are in bytes. Times are in seconds, unless the name ends in `_ms`. They are durations: clocks
of two hosts are never compared.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pullfill.errors import BadMessage, OtherVersion

# Builds of one version work together, so within a version structs change in these ways only:
#
# - A reader ignores fields that it does not know. A new field is optional, and a reader that
#   ignores it still does the right thing.
# - An optional field may go, if builds that read it do the right thing without it. No other field
#   gets its name.
# - A new kind of message, or a new word of an enum, is sent only to a peer that has said in a field
#   that it knows it.
# - Whatever else changes needs a new WIRE_VERSION. Its processes have streams of their own
#   (`Compat.hash`), and none joins a namespace in which the other version lives.
WIRE_VERSION = 12

Count = Annotated[int, Meta(ge=0)]
Id = Annotated[str, Meta(min_length=1, max_length=128)]
# Neither infinite nor NaN: one such duration would spoil a histogram's sum or a timer for good.
Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
MAX_TEXT = 2048
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Version = Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all wire structs."""


class _Versioned(msgspec.Struct):
    """The part of a top-level message that every version has."""

    v: int


T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """msgpack bytes of `message`."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Decode `data` as `kind`. Raises OtherVersion or BadMessage (never a msgspec error)."""
    try:
        return _decoder(kind).decode(data)  # type: ignore[no-any-return, arg-type]
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise _bad(data, kind, exc) from exc


def _bad(data: bytes | bytearray | memoryview, kind: Any, exc: Exception) -> BadMessage:
    """Return what to raise for bytes that cannot be decoded."""
    try:
        version = _decoder(_Versioned).decode(data).v
    except (msgspec.MsgspecError, ValueError, RecursionError):
        version = WIRE_VERSION
    if version == WIRE_VERSION:
        return BadMessage(f"not a valid {getattr(kind, '__name__', kind)}: {exc}")
    return OtherVersion(
        f"wire version {version}, but this pullfill speaks version {WIRE_VERSION}: run the same "
        "release everywhere in a namespace"
    )


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Made once: for a union of messages that takes twenty times as long as decoding one."""
    return msgspec.msgpack.Decoder(kind)


class Compat(Message, frozen=True, kw_only=True):
    """What two workers must share to exchange KV bytes. Compared field by field at join."""

    model: str
    model_fingerprint: str
    vllm: str
    dtype: str
    kv_cache_dtype: str
    # Number of tokens of a block.
    block_size: Count
    # Order of pages.
    layout: str
    num_layers: Count
    num_kv_heads: Count
    # Bytes of one layer and KV head of a block.
    page_bytes: Count
    isa: str
    # This and the next: see engine/kv.py.
    attention: str
    kv_scales: str
    # See engine/groups.py.
    kv_groups: str

    def hash(self, version: int = WIRE_VERSION) -> str:
        """The wire version and 16 hex digits over all fields: `v12-…`.

        It names the job stream. So only workers that fit, and can read each other, share one."""
        digest = hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()
        return f"v{version}-{digest}"

    def differs_from(self, other: Compat) -> list[tuple[str, object, object]]:
        """(field, ours, theirs) for each field that differs."""
        return [
            (name, getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
