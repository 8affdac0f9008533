"""`pullfill suspects`: lists and clears requests that killed decode workers and are refused."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from pullfill.config import ClusterRef
from pullfill.deploy.members import ask_etcd
from pullfill.errors import ConfigError
from pullfill.registry import suspect_records
from pullfill.registry.client import EtcdClient


def show(ref: ClusterRef, as_json: bool) -> None:
    """Print the refused requests. Raises RegistryUnavailable."""
    rows = posted(ref)
    if as_json:
        print(json.dumps(rows))
    else:
        Console().print(table(rows) if rows else "no request is refused", soft_wrap=True)


def posted(ref: ClusterRef) -> list[dict[str, Any]]:
    """Return the requests that all frontends refuse, from etcd. Raises RegistryUnavailable."""
    return ask_etcd(ref, suspect_records.posted)


def clear(ref: ClusterRef, fingerprint: str | None) -> None:
    """Allow a request again. Raises ConfigError if it is not refused.

    fingerprint: of the request. None: allow all."""

    async def allow(etcd: EtcdClient, namespace: str) -> list[str]:
        names = [str(r["fingerprint"]) for r in await suspect_records.posted(etcd, namespace)]
        chosen = names if fingerprint is None else [fingerprint]
        for name in chosen:
            if not await suspect_records.clear(etcd, namespace, name):
                known = ", ".join(names) or "none"
                raise ConfigError(f"{name!r} is not refused; refused are: {known}")
        return chosen

    print(f"allowed again: {', '.join(ask_etcd(ref, allow)) or 'nothing was refused'}")


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the entries of `suspects` in `GET /pullfill/status`."""
    result = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("suspect", "state", "deaths", "prompt tokens", "for another"):
        result.add_column(column)
    for row in rows:
        deaths, tokens, left = row["deaths"], row["prompt_tokens"], f"{row['left_s']:.0f} s"
        result.add_row(row["fingerprint"], row["state"], str(deaths), str(tokens), left)
    return result
