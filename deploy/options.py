"""Command-line options that several commands share, and how they name a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from pullfill.config import STATE_DIR_ENV, ClusterRef
from pullfill.errors import ConfigError
from pullfill.net.security import SECURITY_ENV
from pullfill.wire import DigestMode, KvMode

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
SecurityOption = Annotated[
    str | None,
    typer.Option(
        "--security",
        metavar="FILE",
        envvar=SECURITY_ENV,
        show_envvar=False,
        help=f"Credentials and keys (docs/security.md), or ${SECURITY_ENV}",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="PATH|demo", help="Checkpoint directory, hub name, or the demo model"
    ),
]
HostOption = Annotated[str, typer.Option("--host", metavar="H", help="Address to bind")]
WorkerHostOption = Annotated[
    str, typer.Option("--host", metavar="H", help="Address to bind, and to tell others")
]
InstanceOption = Annotated[str | None, typer.Option("--instance-id", hidden=True)]
LeaseOption = Annotated[
    int, typer.Option("--lease-ttl", metavar="S", min=2, help="Seconds until a dead one is gone")
]
DrainOption = Annotated[
    float, typer.Option("--drain-timeout", metavar="S", min=0, help="Longest drain, seconds")
]
ConnectOption = Annotated[
    float,
    typer.Option("--connect-timeout", metavar="S", min=0, help="Longest wait for NATS and etcd"),
]
CpuOption = Annotated[
    str | None, typer.Option("--cpu", metavar="N", help="Pin to these cores, e.g. 1 or 0-3")
]
PinOption = Annotated[
    bool, typer.Option("--pin/--no-pin", help="On CPU, give workers cores of their own")
]
StallOption = Annotated[
    float,
    typer.Option(
        "--engine-stall-timeout",
        metavar="S",
        min=1,
        help="Give up an engine that takes no step for this long while requests wait",
    ),
]
InflightOption = Annotated[
    int,
    typer.Option(
        "--max-inflight",
        metavar="N",
        min=1,
        help="HTTP requests a frontend serves at once (n > 1 counts once); more get 429",
    ),
]
RestartWaitOption = Annotated[
    float,
    typer.Option(
        "--restart-wait",
        metavar="S",
        min=0,
        help="How long a request whose decode worker died waits for one that is being started",
    ),
]
KvDigestOption = Annotated[
    DigestMode,
    typer.Option(
        "--kv-digest",
        metavar="off|sample|full",
        help="Compare the KV that prefill workers write with digests they send",
    ),
]
KvModeOption = Annotated[
    KvMode,
    typer.Option(
        "--kv-mode",
        metavar="push_async|push|pull",
        help="push_async: prefill workers write KV while they compute the next chunk; push: they"
        " write, then compute; pull: the decode worker reads it",
    ),
]
KvCreditsOption = Annotated[
    int | None,
    typer.Option(
        "--kv-credits",
        metavar="MIB",
        min=1,
        help="Stop pulling jobs while this much KV (MiB) for one decode worker is computed but not"
        " delivered"
        "  [default: 256, or the KV of a whole prefill budget if that is more]",
    ),
]
StandingLinksOption = Annotated[
    int,
    typer.Option(
        "--standing-links",
        metavar="N",
        min=1,
        help="How many prefill workers stay connected to one decode worker; the others connect when"
        " they have a job of it. Give all prefill workers the same number",
    ),
]
TransportsOption = Annotated[
    str | None,
    typer.Option(
        "--transports",
        metavar="NAME,...",
        help="Transports that may move KV: cuda_ipc, shm, nccl, nixl, tcp"
        "  [default: all that work here but nixl]",
    ),
]
KvPortOption = Annotated[
    int,
    typer.Option("--kv-port", min=0, max=65535, help="Port for KV over tcp; 0: any"),
]
HttpPortOption = Annotated[
    int,
    typer.Option(
        "--http-port", min=0, max=65535, help="Port of /live, /ready, /metrics and /status; 0: any"
    ),
]
AdvertiseKvOption = Annotated[
    str | None,
    typer.Option(
        "--advertise-kv",
        metavar="tcp://H:P",
        help="Publish this address for KV instead of the bound one",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that hand unknown flags to vLLM."""


def own_options(context: typer.Context, *commands: str) -> set[str]:
    """Every option of these pullfill commands, e.g. `--port`."""
    group = context.find_root().command
    found = set(context.help_option_names)
    for command in commands:
        for param in group.commands[command].params:  # type: ignore[attr-defined]
            found |= {*param.opts, *param.secondary_opts}
    return found


def find_cluster(
    state_dir: str | None,
    etcd: str | None,
    nats: str | None,
    namespace: str | None,
    security: str | None = None,
) -> ClusterRef:
    """For commands that look: etcd alone is enough. Raises ConfigError saying what to do."""
    if etcd and not nats:
        try:
            return ClusterRef.resolve(
                state_dir=state_dir, etcd=etcd, namespace=namespace, security=security
            )
        except ConfigError:
            return ClusterRef.resolve(
                etcd=etcd, nats="nats://", namespace=namespace, security=security
            )
    return ClusterRef.resolve(
        state_dir=state_dir, etcd=etcd, nats=nats, namespace=namespace, security=security
    )
