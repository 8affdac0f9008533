"""`pullfill registry ls|dump` and `pullfill queue ls|show|dead|purge`: what etcd and NATS hold."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import ask_etcd, workers
from pullfill.deploy.view import plain
from pullfill.errors import ConfigError
from pullfill.queue import browse
from pullfill.queue.names import Names
from pullfill.queue.nats_connection import NatsConnection
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient, KeyValue


def registry_ls(ref: ClusterRef, as_json: bool) -> int:
    """Print the members that etcd holds: workers and frontends, each on its lease."""
    records = ask_etcd(ref, workers)
    if as_json:
        _print_json(records)
        return 0
    told = ["role", "instance_id", "state", "model", "host", "pid", "http"]
    rows = [[str(getattr(record, name)) for name in told] for record in records]
    _print_table(told, rows, "no member is registered")
    return 0


def registry_dump(ref: ClusterRef, as_json: bool) -> int:
    """Print every key of the namespace with its value, whoever wrote it.

    As JSON also the revision that was read, and of each key its version, the revision that wrote it
    and its lease in hex, as etcdctl names leases. "": it has no lease."""

    async def ask(etcd: EtcdClient, namespace: str) -> tuple[list[KeyValue], int]:
        return await etcd.get_prefix(keys.namespace_prefix(namespace))

    found, revision = ask_etcd(ref, ask)
    if not as_json:
        for kv in found:
            typer.echo(f"{kv.name}\n{_json(_value_of(kv))}")
        return 0
    told = [
        {
            "key": kv.name,
            "value": _value_of(kv),
            "version": kv.version,
            "mod_revision": kv.mod_revision,
            "lease": f"{kv.lease:016x}" if kv.lease else "",
        }
        for kv in found
    ]
    _print_json({"namespace": ref.namespace, "revision": revision, "keys": told})
    return 0


def _value_of(kv: KeyValue) -> Any:
    """Return the value as JSON can hold it: what pullfill encoded, a text, or bytes in base64."""
    raw = kv.value
    # msgpack is looked at only where a struct begins. Other bytes would be taken for numbers.
    if raw[:1] >= b"\x80":
        with suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            return msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(raw)))
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.json.decode(raw)
    with suppress(UnicodeDecodeError):
        return raw.decode()
    return {"base64": base64.b64encode(raw).decode()}


# --------------------------------------------------------------------------- queue


@dataclass(frozen=True, slots=True)
class Queue:
    """Which queue a command is about.

    name: compatibility hash of its workers. None: all queues of the namespace."""

    ref: ClusterRef
    name: str | None = None

    def ask(
        self, question: Callable[[NatsConnection, Names], Awaitable[object]]
    ) -> dict[str, object]:
        """Return what `question` returns, by name of the queue. Raises QueueUnavailable.

        Raises ConfigError if there is no queue of that name."""

        async def each() -> dict[str, object]:
            options = self.ref.security.nats.options()
            async with browse.opened(self.ref.nats_url, options) as nats:
                here = [row.name for row in await browse.queues(nats, self.ref.namespace)]
                if self.name is not None and self.name not in here:
                    there = ", ".join(here) or "none"
                    raise ConfigError(f"no queue {self.name!r} in namespace "
                                      f"{self.ref.namespace}; there are: {there}")  # fmt: skip
                chosen = here if self.name is None else [self.name]
                return {n: await question(nats, Names(self.ref.namespace, n)) for n in chosen}

        return asyncio.run(each())


def queue_ls(ref: ClusterRef, as_json: bool) -> int:
    """Print the queues of the namespace."""

    async def ask() -> list[browse.QueueRow]:
        async with browse.opened(ref.nats_url, ref.security.nats.options()) as nats:
            return await browse.queues(nats, ref.namespace)

    rows = asyncio.run(ask())
    if as_json:
        _print_json(rows)
        return 0
    _print_structs(browse.QueueRow, rows, f"no queue in namespace {ref.namespace}")
    return 0


def queue_show(queue: Queue, as_json: bool, most: int) -> int:
    """Print jobs, the oldest first."""

    async def ask(nats: NatsConnection, names: Names) -> list[browse.JobRow]:
        return await browse.jobs(nats, names, most)

    return _print_each(queue.ask(ask), browse.JobRow, as_json, "no job")


def queue_dead(queue: Queue, as_json: bool, most: int) -> int:
    """Print dead letters, the oldest first."""

    async def ask(nats: NatsConnection, names: Names) -> list[browse.DeadRow]:
        return await browse.dead(nats, names, most)

    return _print_each(queue.ask(ask), browse.DeadRow, as_json, "no dead letter")


def queue_purge(queue: Queue, as_json: bool, *, letters: bool, sure: bool) -> int:
    """Delete jobs, or dead letters. sure: do not ask before. Raises ConfigError if refused."""
    what = "dead letters" if letters else "jobs"
    where = f"of queue {queue.name}" if queue.name else f"of namespace {queue.ref.namespace}"
    if not sure and not typer.confirm(f"delete all {what} {where}?"):
        raise ConfigError("nothing was deleted")

    async def ask(nats: NatsConnection, names: Names) -> int:
        return await browse.purge(nats, names, letters=letters)

    gone = queue.ask(ask)
    if as_json:
        _print_json(gone)
        return 0
    for name, count in gone.items():
        typer.echo(f"{name}: {count} {what} deleted")
    return 0


def _print_each(
    found: dict[str, object], kind: type[msgspec.Struct], as_json: bool, nothing: str
) -> int:
    if as_json:
        _print_json(found)
        return 0
    for name, rows in found.items():
        assert isinstance(rows, list)
        typer.echo(f"queue {name}:")
        _print_structs(kind, rows, nothing)
    if not found:
        typer.echo("no queue")
    return 0


def _print_json(told: object) -> None:
    typer.echo(_json(told))


def _json(told: object) -> str:
    return msgspec.json.encode(told).decode()


def _print_structs(
    kind: type[msgspec.Struct], rows: Sequence[msgspec.Struct], nothing: str
) -> None:
    names = list(kind.__struct_fields__)
    _print_table(names, [[_text(getattr(row, name)) for name in names] for row in rows], nothing)


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    if not rows:
        typer.echo(nothing)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))  # clients choose the ids of requests
    Console().print(table)
