"""Builds of one wire version work together, both ways; those of another one are told apart."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import msgspec
import pytest

from pullfill.errors import OtherVersion
from pullfill.queue.streams import Names
from pullfill.wire import WIRE_VERSION, Compat, PrefillJob
from pullfill.wire.codec import decode, encode
from tests.support.wire_examples import RECORDS, STRUCTS, example, required

OLD = msgspec.json.decode((RECORDS / f"wire-{WIRE_VERSION}.json").read_bytes())
"""What the first builds of this version say, and how they read."""
KINDS = {kind.__name__: kind for kind in STRUCTS}
# Fields that no build reads any more, each with why the others do the right thing without it.
GONE: set[str] = set()


@pytest.mark.parametrize("name", OLD["messages"])
@pytest.mark.essential
def test_what_the_first_build_says_is_read(name: str) -> None:
    for told in map(b64decode, OLD["messages"][name]):
        read = msgspec.msgpack.decode(encode(decode(told, KINDS[name])))
        check_read(msgspec.msgpack.decode(told), read, name)


def check_read(said: dict[str, Any], read: dict[str, Any], kind: str = "") -> None:
    """Each field that builds read now is as it was said, also in the messages in it."""
    for name, value in said.items():
        if not GONE.isdisjoint({name, f"{kind}.{name}"}):
            continue
        if isinstance(value, dict):
            check_read(value, read[name])
        else:
            assert read[name] == value, name


@pytest.mark.parametrize("name", OLD["messages"])
def test_the_first_build_reads_what_is_said(name: str) -> None:
    import jsonschema

    kind = KINDS[name]
    schema = {"$ref": f"#/schemas/{name}", "schemas": OLD["schemas"]}
    for fields in (None, required(kind)):
        message = msgspec.json.decode(msgspec.json.encode(example(kind, fields)))
        assert list(jsonschema.Draft202012Validator(schema).iter_errors(message)) == []


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_ignored(kind: type[msgspec.Struct]) -> None:
    fields = msgspec.msgpack.decode(encode(example(kind))) | {"new": {"of": ["any", "type"]}}
    assert decode(msgspec.msgpack.encode(fields), kind) == example(kind)


def test_another_version_is_told_apart() -> None:
    newer = msgspec.msgpack.encode({"v": WIRE_VERSION + 1, "all": "else differs"})
    with pytest.raises(OtherVersion, match=f"{WIRE_VERSION + 1}, but .* {WIRE_VERSION}: run"):
        decode(newer, PrefillJob)


@pytest.mark.essential
def test_each_version_has_a_stream_of_its_own() -> None:
    compat = example(Compat)
    assert Names("ns", compat.hash()).stream == OLD["stream"]
    newer = compat.hash(WIRE_VERSION + 1)
    assert newer == compat.hash().replace(f"v{WIRE_VERSION}-", f"v{WIRE_VERSION + 1}-")
    assert Names("ns", newer).stream != OLD["stream"]
