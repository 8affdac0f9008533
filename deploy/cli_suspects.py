"""The `pullfill suspects` commands; see cli.py."""

from __future__ import annotations

from typing import Annotated

import typer

from pullfill.deploy.options import (
    EtcdOption,
    JsonOption,
    NamespaceOption,
    NatsOption,
    SecurityOption,
    StateDirOption,
    find_cluster,
)
from pullfill.errors import ConfigError

app = typer.Typer(
    help="Requests that are refused because decode workers died with them.",
    invoke_without_command=True,
)


@app.callback()
def _list(
    context: typer.Context,
    as_json: JsonOption = False,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from pullfill.deploy import suspects_report

    suspects_report.show(find_cluster(state_dir, etcd, nats, namespace, security), as_json)


@app.command("clear")
def _clear(
    fingerprint: Annotated[str | None, typer.Argument(metavar="[FINGERPRINT]")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them")] = False,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Allow a refused request again, at all frontends."""
    if (fingerprint is None) != every:
        raise ConfigError("name one FINGERPRINT (`pullfill suspects` lists them), or --all")
    from pullfill.deploy import suspects_report

    suspects_report.clear(find_cluster(state_dir, etcd, nats, namespace, security), fingerprint)
