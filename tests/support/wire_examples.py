"""A valid message of every kind, and a record of them: `python -m tests.support.wire_examples`.

The record is what builds of one wire version say, and how they read. It is made once for each
WIRE_VERSION.
"""

from __future__ import annotations

import re
import typing
from base64 import b64encode
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar, Union, get_args

import msgspec

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.queue.streams import Names
from pullfill.transfer.cuda_ipc.ipc_transport import Exported
from pullfill.transfer.nccl import nccl_backend as nccl
from pullfill.transfer.nixl import nixl_backend as nixl
from pullfill.transfer.shm.files import Endpoint
from pullfill.transfer.stream import kv_protocol as stream

_MODULES = (front_wire, nccl, nixl, stream)  # their structs are subclasses, once imported
S = TypeVar("S", bound=msgspec.Struct)
RECORDS = Path(__file__).resolve().parents[1] / "unit" / "core"


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for one in kind.__subclasses__():
        # What snapshot.py makes of records is JSON for browsers.
        if one.__module__.startswith("pullfill.") and one.__module__ != "pullfill.snapshot":
            yield one
            yield from _subclasses(one)


STRUCTS = sorted(
    {*_subclasses(wire.Message), *_subclasses(Endpoint), Exported}, key=lambda kind: kind.__name__
)


def required(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if field.required]


def _value(kind: Any) -> Any:
    """Some valid value of a field's type."""
    kind = getattr(kind, "__value__", kind)
    text = str(kind)
    if isinstance(kind, str):  # the first word of a Literal
        return kind
    if kind == wire.Version:
        return wire.WIRE_VERSION
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return example(kind)
    if "bytes" in text:
        return b"n" * (64 if "min_length=64" in text else 32)
    if get_args(kind) and not hasattr(kind, "__metadata__"):
        origin = getattr(kind, "__origin__", Union)
        if origin is list:
            return [_value(get_args(kind)[0])]
        if origin is tuple:
            return tuple(_value(part) for part in get_args(kind) if part is not ...)
        if origin is dict:
            return {"k": "v"}
        return _value(get_args(kind)[0])
    if hasattr(kind, "__metadata__"):
        return 1 << 16 if "ge=65536" in text or "ge=4096" in text else _value(kind.__origin__)
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return next(iter(kind))  # type: ignore[call-overload]
    return {int: 1, float: 1.0, str: "id", bool: True}[kind]


def example(kind: type[S], fields: Collection[str] | None = None) -> S:
    """A valid message of `kind` with these fields set. None: with every field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = kind.__struct_fields__ if fields is None else fields
    return kind(**{name: _value(hints[name]) for name in names})


def record() -> dict[str, Any]:
    """What this build says (msgpack in base64: with all fields, and with the required ones only),
    how it reads (JSON schemas), and what it calls the job stream of the example's `Compat`."""
    _, schemas = msgspec.json.schema_components(STRUCTS, ref_template="#/schemas/{name}")
    for schema in schemas.values():
        schema.pop("description", None)  # the docstring
    messages = {
        kind.__name__: [
            b64encode(msgspec.msgpack.encode(example(kind, fields))).decode()
            for fields in (None, required(kind))
        ]
        for kind in STRUCTS
    }
    return {
        "version": wire.WIRE_VERSION,
        "stream": Names("ns", example(wire.Compat).hash()).stream,
        "messages": messages,
        "schemas": schemas,
    }


if __name__ == "__main__":
    path = RECORDS / f"wire-{wire.WIRE_VERSION}.json"
    assert not path.exists(), f"{path} is what builds out there say"
    text = msgspec.json.encode(record()).decode()
    # One line for each struct.
    path.write_text(re.sub(r'(?<=[\]}{]),?(?="[A-Z]\w+":)', lambda m: m[0] + "\n", text) + "\n")
