"""Requests that find no room because of quarantined blocks migrate, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.leave import NO_ROOM_S, make_way


class _Shim:
    """waiting: requests that wait for blocks; for `waited_s` by now."""

    def __init__(self, waiting: set[str], waited_s: float) -> None:
        self.returned: set[str] = set()
        self.host = SimpleNamespace(
            waiting_for_blocks=lambda longer: waiting if waited_s >= longer else set()
        )

    def migrate(self, ids: set[str]) -> None:
        self.returned |= ids


@pytest.mark.parametrize(
    ("waited_s", "quarantined", "returned"),
    [
        (NO_ROOM_S, 7, {"a", "b"}),
        (NO_ROOM_S - 1, 7, set()),  # a writer that runs is quiet within milliseconds
        (NO_ROOM_S, 0, set()),  # vLLM's own business: what runs will end
    ],
)
def test_who_is_handed_back(waited_s: float, quarantined: int, returned: set[str]) -> None:
    request_server: Any = _Shim({"a", "b"}, waited_s)
    ledger: Any = SimpleNamespace(quarantined_blocks=quarantined)
    make_way(request_server, ledger)
    assert request_server.returned == returned


def test_blocks_whose_reader_is_stopped_make_way_too() -> None:
    request_server: Any = _Shim({"a"}, NO_ROOM_S)
    ledger: Any = SimpleNamespace(quarantined_blocks=0)
    make_way(request_server, ledger, leased=3)
    assert request_server.returned == {"a"}
