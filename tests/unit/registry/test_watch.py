"""What a watch knows of its keys, and which changes it tells."""

from __future__ import annotations

from pullfill.registry.client import KeyValue
from pullfill.registry.watch import Delete, Put, _Changed, _Known


def kv(key: bytes, mod: int, value: bytes = b"") -> KeyValue:
    return KeyValue(key, value, mod, mod, 1, 0)


def test_known_diff_tells_what_changed_and_no_more() -> None:
    known = _Known({})
    assert known.diff([kv(b"a", 2), kv(b"b", 3)], 3) == [Put(b"a", b"", 2), Put(b"b", b"", 3)]
    # Another life of the store: b looks the same but is not, a is gone.
    assert known.diff([kv(b"b", 2)], 2) == [Delete(b"a", b"", 2), Put(b"b", b"", 2)]
    assert known.diff([kv(b"b", 2)], 5) == []
    assert known.rev == 5


def test_known_apply_drops_what_was_seen() -> None:
    known = _Known({}, rev=4)
    events = [_Changed(kv(b"a", 4)), _Changed(kv(b"a", 5, b"x")), _Changed(kv(b"a", 6), "DELETE")]
    assert known.apply(events) == [Put(b"a", b"x", 5), Delete(b"a", b"", 6)]
    assert (known.keys, known.rev) == ({}, 6)
