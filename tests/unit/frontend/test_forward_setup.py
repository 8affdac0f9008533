"""Flags that fit together, and what `--forwarder pull` makes: nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from pullfill.errors import ConfigError
from pullfill.frontend.forward.setup import Forwarding, check
from pullfill.options import Dispatch, ForwarderName, FrontendOptions

STAGED = FrontendOptions(forwarder=ForwarderName.STAGED)
BATCH = FrontendOptions(forwarder=ForwarderName.BATCH)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (FrontendOptions(servers="decode=http://a:1"), "add --forwarder staged or batch"),
        (FrontendOptions(dispatch=Dispatch.SERIAL), "--dispatch is for stock vLLM servers"),
        (replace(STAGED, protocol="ucx"), "no protocol is called 'ucx': use one of nixl"),
        (replace(STAGED, dispatch=Dispatch.PARALLEL), "--dispatch parallel is for"),
        (replace(STAGED, protocol="p2p"), "use --forwarder batch"),
        (replace(BATCH, dispatch=Dispatch.PARALLEL), "nixl has no --dispatch parallel: use serial"),
        (replace(BATCH, servers="decode"), "cannot read the server 'decode'"),
    ],
)
def test_flags_that_do_not_fit(options: FrontendOptions, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(options)


@pytest.mark.parametrize(
    "options",
    [
        FrontendOptions(),
        replace(STAGED, protocol="mooncake", servers="decode=http://a:1"),
        replace(BATCH, protocol="p2p", dispatch=Dispatch.SINGLE),
    ],
)
def test_flags_that_fit(options: FrontendOptions) -> None:
    check(options)


async def test_pull_makes_nothing() -> None:
    assert Forwarding.of(FrontendOptions(), ("m",), cast(Any, None)) is None


async def test_the_servers_are_known_at_once() -> None:
    servers = "prefill=http://127.0.0.1:1,decode=http://127.0.0.1:2"
    found = Forwarding.of(replace(STAGED, servers=servers, model="m"), ("m",), cast(Any, None))
    assert found is not None
    try:
        assert [row["url"] for row in found.servers.status()] == [
            "http://127.0.0.1:2", "http://127.0.0.1:1",
        ]  # fmt: skip
        assert "no stock decode server is ready: http://127.0.0.1:2" in found.stock.trouble()
    finally:
        await found.close()
