"""Options of `pullfill up`, and how a command names its cluster. See `pullfill/options.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from pullfill.config import ClusterRef
from pullfill.errors import ConfigError
from pullfill.net.security import OPEN, Security
from pullfill.options import ClusterOptions, Flag, FrontendOptions, WorkerOptions

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]


@dataclass(slots=True, kw_only=True)
class UpOptions:
    """The command line of `up`.

    workers, frontend: what every worker and every frontend is started with.
    etcd_url, nats_url: servers to use. None: start one.
    vllm_args: vLLM flags of every process.
    role_args: vLLM flags by role. They come after the flags for all roles.
    """

    model: Annotated[
        str, Flag(metavar="PATH|demo", help="Checkpoint directory, hub name, or demo")
    ] = "demo"
    decode: Annotated[int, Flag(metavar="N", least=0, help="Decode workers")] = 1
    prefill: Annotated[int, Flag(metavar="N", least=0, help="Prefill workers")] = 1
    frontends: Annotated[int, Flag(metavar="N", least=0, help="HTTP frontends")] = 1
    host: Annotated[str, Flag(metavar="H", help="Where frontends listen")] = "127.0.0.1"
    port: Annotated[
        int,
        Flag(least=0, most=65535, help="Of the first frontend, others follow; 0: any free one"),
    ] = 8000
    ready_timeout_s: Annotated[
        float, Flag(metavar="S", least=1, help="Longest start, in seconds")
    ] = 600.0
    restart: Annotated[
        bool, Flag(name="--restart/--no-restart", help="Restart processes that die")
    ] = True
    namespace: str = "default"
    etcd_url: str | None = None
    nats_url: str | None = None
    security: Security = OPEN
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    vllm_args: list[str] = field(default_factory=list)
    role_args: dict[str, list[str]] = field(default_factory=dict)

    @property
    def frontend_url(self) -> str:
        """Where clients reach the first frontend. Empty: there is none."""
        return frontend_url(self.host, self.port) if self.frontends else ""


def frontend_url(host: str, port: int) -> str:
    """Return a URL that reaches a server bound to `host`. For a wildcard: the loopback address."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def find_cluster(cluster: ClusterOptions) -> ClusterRef:
    """Return the cluster for a command that only looks at it. `--etcd` alone is enough for it.

    Raises ConfigError, which says what to do."""
    given = asdict(cluster)
    try:
        return ClusterRef.resolve(**given)
    except ConfigError:
        if not cluster.etcd or cluster.nats:
            raise
        return ClusterRef.resolve(**given | {"nats": "nats://", "state_dir": None})
