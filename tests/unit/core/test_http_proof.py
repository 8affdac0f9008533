"""Who asks a frontend shows the proof of a key, which opens one path for five minutes."""

from __future__ import annotations

import pytest

from pullfill.net.http_proof import VALID_S, digest, proof, proven

KEY, OTHER, PATH, NOW = b"client-key-0123456789", b"another-key-01234567", "/a/ä%2F", 1.7e9
KNOWN = [digest(OTHER), digest(KEY)]


def shown(key: bytes = KEY, path: str = PATH, now: float = NOW) -> bytes:
    return proof(key, path, now).encode()


def test_a_proof_of_any_key_holds_and_does_not_tell_it() -> None:
    for key in (KEY, OTHER):
        assert proven(shown(key), PATH, KNOWN, NOW)
        assert key not in shown(key)
        assert digest(key).hex().encode() not in shown(key)


def test_it_holds_for_its_path_its_key_and_its_time_only() -> None:
    assert not proven(shown(path="/b"), PATH, KNOWN, NOW)
    assert not proven(shown(b"a key that nobody knows"), PATH, KNOWN, NOW)
    assert not proven(shown(), PATH, [], NOW)
    for apart in (-90, 90):  # clocks of hosts that nobody synchronises
        assert proven(shown(), PATH, KNOWN, NOW + apart)
    for apart in (-VALID_S, VALID_S):
        assert proven(shown(), PATH, KNOWN, NOW + apart)
        assert not proven(shown(), PATH, KNOWN, NOW + apart * 1.1)


def test_its_time_cannot_be_changed() -> None:
    late = NOW + 10 * VALID_S
    assert not proven(shown().replace(b"17", b"%d" % int(late), 1), PATH, KNOWN, late)
    assert not proven(b"%d %b" % (late, shown().split()[1]), PATH, KNOWN, late)


@pytest.mark.parametrize(
    "broken",
    [b"", b" ", b"1", b"-1 00", b"nan 00", b"9" * 5000 + b" 00", b"\xb2 00", b"1700000000 \xff"],
)
def test_what_is_no_proof_is_refused(broken: bytes) -> None:
    assert not proven(broken, PATH, KNOWN, NOW)
