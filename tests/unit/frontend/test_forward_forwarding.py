"""Flags that fit together, and what `--forwarder pull` makes: nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from pullfill.errors import ConfigError
from pullfill.frontend.forward.forwarding import Forwarding, check
from pullfill.options import Dispatch, ForwarderName, FrontendOptions, parse_networks

STAGED = FrontendOptions(forwarder=ForwarderName.STAGED)
NETWORKS = parse_networks("10.0.0.0/24")
BATCH = FrontendOptions(forwarder=ForwarderName.BATCH)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (FrontendOptions(servers="decode=http://a:1"), "add --forwarder staged or batch"),
        (FrontendOptions(servers_file="f"), "--servers-file is for stock vLLM servers"),
        (replace(STAGED, servers_file="/none/f.yaml"), "cannot read /none/f.yaml .No such file"),
        (FrontendOptions(heartbeats="tcp://127.0.0.1:7"), "--heartbeats is for stock vLLM servers"),
        (replace(STAGED, heartbeats="tcp://192.0.2.1:7"), "cannot listen on tcp://192.0.2.1:7"),
        (replace(STAGED, heartbeats="tcp://0.0.0.0:*"), "--heartbeats-from 10.0.0.0/24"),
        (replace(STAGED, heartbeats_from=NETWORKS), "--heartbeats-from is for --heartbeats"),
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
        replace(STAGED, heartbeats="tcp://0.0.0.0:*", heartbeats_from=NETWORKS),
    ],
)
def test_flags_that_fit(options: FrontendOptions) -> None:
    check(options)


async def test_pull_makes_nothing() -> None:
    assert Forwarding.of(FrontendOptions(), ("m",), cast(Any, None)) is None


async def test_the_servers_of_a_file_are_known_and_a_broken_file_is_a_trouble(
    tmp_path: Path,
) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text("- {role: decode, url: http://127.0.0.1:2}\n")
    options = replace(STAGED, servers="prefill=http://127.0.0.1:1", servers_file=str(path))
    found = Forwarding.of(replace(options, model="m"), ("m",), cast(Any, None))
    assert found is not None
    assert found.file is not None
    try:
        rows = {row["role"]: row["sources"] for row in found.servers.status()}
        assert rows == {"decode": ("--servers-file",), "prefill": ("--servers",)}
        path.write_text("- {role: decode}\n")
        for _ in range(2):
            await found.file.look()
        assert found.troubles()[-1].startswith(f"{path}, line 1: url: the server has none")
        assert len(found.servers.known) == 2
    finally:
        await found.close()
