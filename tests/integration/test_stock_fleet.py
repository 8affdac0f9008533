"""Two stock prefill servers and two stock decode servers behind our frontends. One is killed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.oracle import Oracle
from tests.support.stock_peers import FORWARDERS, LONG, Peers, killed, prompt, right, stock_peers

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
    ),
]


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    with stock_peers(tmp_path_factory.mktemp("fleet"), model_path, 2, 2) as peers:
        yield peers


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_one_of_two_servers_is_killed_under_load(
    role: str, fleet: Peers, oracle: Oracle
) -> None:
    server, other = fleet.of(role)
    first = 400 if role == "prefill" else 500
    prompts, answers = await killed(fleet, server, first)
    whole = right(oracle, prompts, LONG)
    for number, (got, expected) in enumerate(zip(answers, whole, strict=True)):
        if not got.error:
            assert got.tokens == expected
            continue
        # A stream that has begun cannot be repeated. Nothing else may fail.
        assert (role, number % 4 < 2, got.status) == ("decode", True, 200)
        assert got.tokens == expected[: len(got.tokens)]
        assert f"decode server {server.url} broke off" in got.error
    ready = {"prefill": 2, "decode": 2} | {role: 1}
    await fleet.ready(**ready)
    after = [prompt(first + 50 + n, 60) for n in range(4)]
    asked = [await fleet.ask([*FORWARDERS][n % 2], ids) for n, ids in enumerate(after)]
    assert [got.tokens for got in asked] == right(oracle, after)
    assert other.alive
    await fleet.freed()
    server.launch()
    server.ready()
    await fleet.ready(2, 2)
