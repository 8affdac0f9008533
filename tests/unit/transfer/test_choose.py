"""Which transport is taken, and why the better ones are not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pullfill.errors import IncompatibleError
from pullfill.transfer.choose import choose
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.shm.peer import ShmTransport
from tests.support.transfer_rigs import (
    shm_rig,
)

LAYOUT = dense_layout(2, 8, 2, 64)


class Fake:
    def __init__(self, name: str, why_not: str | None = None) -> None:
        self.name, self.why_not = name, why_not

    def can_reach(self, descriptor: object) -> str | None:
        return self.why_not

    connect = None


def test_best_reachable_transport_is_chosen_with_reasons(tmp_path: Path) -> None:
    region = shm_rig(tmp_path).region(LAYOUT)
    region.owner.close()
    descriptor = msgspec.structs.replace(
        region.descriptor, endpoints={"tcp": "t", "shm": "x", "odd": "o"}
    )
    tcp, cuda, odd = Fake("tcp"), Fake("cuda_ipc"), Fake("odd")
    chosen, why_not = choose(descriptor, [odd, tcp, ShmTransport(), cuda])  # type: ignore[list-item]
    assert chosen is tcp
    assert [name for name, _ in why_not] == ["cuda_ipc", "shm"]
    assert "does not offer" in why_not[0][1]
    assert "endpoint" in why_not[1][1]
    assert choose(descriptor, [odd])[0] is odd  # type: ignore[list-item]
    with pytest.raises(IncompatibleError, match=r"tcp: cut off; .*odd: not available") as caught:
        choose(descriptor, [Fake("tcp", "cut off")])  # type: ignore[list-item]
    assert caught.value.field == "endpoints"
