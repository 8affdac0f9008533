"""`pullfill suspects`: lists and clears requests that killed decode workers and are refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from pullfill.config import ClusterRef
from pullfill.deploy.members import Members
from pullfill.errors import ConfigError
from pullfill.registry import suspect_records as board


def show(ref: ClusterRef, as_json: bool) -> None:
    """Print the refused requests. Raises RegistryUnavailable."""
    rows = posted(ref)
    if as_json:
        print(json.dumps(rows))
    else:
        Console().print(table(rows) if rows else "no request is refused", soft_wrap=True)


def clear(ref: ClusterRef, fingerprint: str | None) -> None:
    """Allow a request again. Raises ConfigError if it is not refused.

    fingerprint: of the request. None: allow all."""
    print(asyncio.run(_allow(ref, fingerprint)))


def posted(ref: ClusterRef) -> list[dict[str, Any]]:
    """Return the requests that all frontends refuse, from etcd. Raises RegistryUnavailable."""

    async def ask() -> list[dict[str, Any]]:
        async with Members(ref) as members:
            records = await board.posted(members.client, ref.namespace)
            return [board.row_of(record) for record in records]

    return asyncio.run(ask())


async def _allow(ref: ClusterRef, fingerprint: str | None) -> str:
    async with Members(ref) as members:
        names = [r.fingerprint for r in await board.posted(members.client, ref.namespace)]
        chosen = names if fingerprint is None else [fingerprint]
        for name in chosen:
            if not await board.clear(members.client, ref.namespace, name):
                known = ", ".join(names) or "none"
                raise ConfigError(f"{name!r} is not refused; refused are: {known}")
    return f"allowed again: {', '.join(chosen) or 'nothing was refused'}"


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the entries of `suspects` in `GET /pullfill/status`."""
    result = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("suspect", "state", "deaths", "prompt tokens", "for another"):
        result.add_column(column)
    for row in rows:
        result.add_row(
            row["fingerprint"],
            row["state"],
            str(row["deaths"]),
            str(row["prompt_tokens"]),
            f"{row['left_s']:.0f} s",
        )
    return result
