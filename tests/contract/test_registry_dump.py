"""`pullfill registry dump` over a real etcd, beside etcdctl."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

from msgspec import msgpack, to_builtins
from typer.testing import CliRunner

from pullfill import wire
from pullfill.deploy import cli
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from tests.support.etcd import EtcdServer, etcd_binary
from tests.support.workers import record


async def dump(etcd: EtcdServer, ns: str, *words: str) -> str:
    where = ("--etcd", etcd.url, "--namespace", ns)

    def run() -> Any:
        return CliRunner().invoke(cli.app, ["registry", "dump", *where, *words])

    result = await asyncio.to_thread(run)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def etcdctl(etcd: EtcdServer, *words: str) -> list[str]:
    line = [str(etcd_binary("etcdctl")), "--endpoints", etcd.url, *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()


async def test_the_keys_are_those_of_etcdctl(etcd: EtcdServer, client: EtcdClient, ns: str) -> None:
    lease = 0x0A54A20B5487EC91  # etcdctl writes the zero, too
    await client.call("/lease/grant", {"TTL": 60, "ID": lease}, dict[str, Any])
    worker = record("decode-1", http="http://h:2")
    await client.put(keys.worker(ns, "decode", "decode-1"), wire.encode(worker), lease)
    await client.put(keys.config(ns, "router"), b'{"policy":"cost"}')
    await client.put(keys.model(ns, "a/b"), b"decode-1")
    await client.put(f"/pullfill/{ns}-2/config/router", b"{}")  # of another namespace
    told = json.loads(await dump(etcd, ns, "--json"))
    assert told["namespace"] == ns
    [router, model, first] = told["keys"]
    assert (router["value"], router["lease"]) == ({"policy": "cost"}, "")
    assert (model["key"], model["value"]) == (f"/pullfill/{ns}/models/a/b", "decode-1")
    assert first["value"] == to_builtins(worker)
    assert first["version"] == 1
    assert told["revision"] >= model["mod_revision"] > first["mod_revision"] > 0
    # This is the command of docs/configuration.md.
    line = ("get", "--prefix", f"/pullfill/{ns}/", "--keys-only")
    seen = await asyncio.to_thread(etcdctl, etcd, *line)
    assert seen == [row["key"] for row in told["keys"]]
    assert first["lease"] in await asyncio.to_thread(etcdctl, etcd, "lease", "list")
    lines = (await dump(etcd, ns)).splitlines()
    assert lines[::2] == seen
    assert json.loads(lines[-1]) == first["value"]


async def test_what_others_wrote_is_shown_as_it_is(
    etcd: EtcdServer, client: EtcdClient, ns: str
) -> None:
    assert json.loads(await dump(etcd, ns, "--json"))["keys"] == []
    odd = {
        b"1": (b"", ""),
        b"2": (b"\x81\xa1", {"base64": "gaE="}),
        b"3": ("grüße".encode(), "grüße"),
        b"4": (msgpack.encode({1: b"\xff", "x": float("nan")}), {"1": "/w==", "x": None}),
        b"5": (b"[" * 100_000, "[" * 100_000),
        b"6": (msgpack.encode(msgpack.Ext(5, b"x")), {"base64": "1AV4"}),
        b"7\xff": (b"123", 123),
    }
    prefix = keys.namespace_prefix(ns).encode()
    for name, (value, _) in odd.items():
        await client.put(prefix + name, value)
    told = json.loads(await dump(etcd, ns, "--json"))["keys"]
    assert [row["value"] for row in told] == [shown for _, shown in odd.values()]
    assert told[-1]["key"] == f"/pullfill/{ns}/7\ufffd"
