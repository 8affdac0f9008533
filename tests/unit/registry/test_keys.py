"""Names of keys in etcd."""

from __future__ import annotations

import pytest

from pullfill.errors import ConfigError
from pullfill.registry import keys


def test_worker_key_round_trip_and_strangers() -> None:
    key = keys.worker("ns", "decode", "decode-1a2b").encode()
    assert key == b"/pullfill/ns/workers/decode/decode-1a2b"
    assert keys.parse_worker("ns", key) == ("decode", "decode-1a2b")
    for other in (b"/pullfill/ns2/workers/decode/x", b"/pullfill/ns/workers/decode", key + b"/y",
                  b"/pullfill/ns/workers/decode/\xff"):  # fmt: skip
        assert keys.parse_worker("ns", other) is None
    assert keys.descriptor("ns", "decode-1", 3) == "/pullfill/ns/descriptors/decode-1/3"
    with pytest.raises(ConfigError, match="instance id"):
        keys.worker("ns", "decode", "a/b")
