"""Command-line options that several commands share, and how they name a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from pullfill.config import STATE_DIR_ENV, ClusterRef
from pullfill.errors import ConfigError

StateDirOption = Annotated[
    str | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        envvar=STATE_DIR_ENV,
        show_envvar=False,
        help=f"Directory of a local cluster  [default: .pullfill, or ${STATE_DIR_ENV}]",
    ),
]
EtcdOption = Annotated[
    str | None, typer.Option("--etcd", metavar="URL", help="etcd, e.g. http://127.0.0.1:2379")
]
NatsOption = Annotated[
    str | None, typer.Option("--nats", metavar="URL", help="NATS, e.g. nats://127.0.0.1:4222")
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="NS", help="Namespace of the cluster")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that hand unknown flags to vLLM."""


def find_cluster(
    state_dir: str | None, etcd: str | None, nats: str | None, namespace: str | None
) -> ClusterRef:
    """For commands that look: etcd alone is enough. Raises ConfigError saying what to do."""
    if etcd and not nats:
        try:
            return ClusterRef.resolve(state_dir=state_dir, etcd=etcd, namespace=namespace)
        except ConfigError:
            return ClusterRef.resolve(etcd=etcd, nats="nats://", namespace=namespace)
    return ClusterRef.resolve(state_dir=state_dir, etcd=etcd, nats=nats, namespace=namespace)
