"""`pullfill decode | prefill | frontend`: command lines of the processes that join a cluster."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer

from pullfill.config import STANDING_LINKS
from pullfill.deploy.options import (
    PASS_THROUGH,
    AdvertiseKvOption,
    ConnectOption,
    CpuOption,
    DrainOption,
    EtcdOption,
    HostOption,
    HttpPortOption,
    InflightOption,
    InstanceOption,
    KvCreditsOption,
    KvDigestOption,
    KvModeOption,
    KvPortOption,
    LeaseOption,
    ModelOption,
    NamespaceOption,
    NatsOption,
    PinOption,
    RestartWaitOption,
    SecurityOption,
    StallOption,
    StandingLinksOption,
    StateDirOption,
    TransportsOption,
    WorkerHostOption,
)
from pullfill.wire import DigestMode, KvMode


def register(app: typer.Typer) -> None:
    """Add the three commands to `app`. Flags not listed in a signature go to vLLM."""
    for command in (decode, prefill, frontend):
        app.command(context_settings=PASS_THROUGH)(command)


def _run(role: str, context: typer.Context, **given: Any) -> NoReturn:
    """given: fields of `RoleCommand`, and what names the cluster."""
    from pullfill.deploy import roles

    where = tuple(given.pop(name) for name in ("state_dir", "etcd", "nats", "namespace"))
    command = roles.RoleCommand(cluster=where, vllm_args=list(context.args), **given)
    run = roles.run_frontend if role == "frontend" else lambda c: roles.run_worker(role, c)
    raise typer.Exit(run(command))


def decode(
    context: typer.Context,
    model: ModelOption = None,
    host: WorkerHostOption = "127.0.0.1",
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
    cpu: CpuOption = None,
    pin: PinOption = True,
    instance_id: InstanceOption = None,
    lease_ttl: LeaseOption = 5,
    drain_timeout: DrainOption = 60.0,
    connect_timeout: ConnectOption = 30.0,
    engine_stall_timeout: StallOption = 60.0,
    kv_digest: KvDigestOption = DigestMode.OFF,
    kv_mode: KvModeOption = KvMode.PUSH_ASYNC,
    transports: TransportsOption = None,
    control_port: Annotated[
        int,
        typer.Option(
            "--control-port", min=0, max=65535, help="Where prefill workers claim jobs; 0: any"
        ),
    ] = 0,
    advertise_control: Annotated[
        str | None,
        typer.Option(
            "--advertise-control",
            metavar="tcp://H:P",
            help="Publish this address for claims instead of the bound one",
        ),
    ] = None,
    kv_port: KvPortOption = 0,
    http_port: HttpPortOption = 0,
    data_port: Annotated[
        int,
        typer.Option("--data-port", min=0, max=65535, help="Where frontends send requests; 0: any"),
    ] = 0,
    advertise_kv: AdvertiseKvOption = None,
) -> None:
    """Run one decode worker that joins a cluster. Other flags go to vLLM."""
    _run(
        "decode",
        context,
        model=model,
        host=host,
        state_dir=state_dir,
        etcd=etcd,
        nats=nats,
        namespace=namespace,
        security=security,
        cpu=cpu,
        pin=pin,
        instance_id=instance_id,
        lease_ttl_s=lease_ttl,
        drain_timeout_s=drain_timeout,
        connect_timeout_s=connect_timeout,
        engine_stall_s=engine_stall_timeout,
        kv_digest=kv_digest,
        kv_mode=kv_mode,
        control_port=control_port,
        data_port=data_port,
        advertise_control=advertise_control,
        transports=transports,
        kv_port=kv_port,
        http_port=http_port,
        advertise_kv=advertise_kv,
    )


def prefill(
    context: typer.Context,
    model: ModelOption = None,
    host: WorkerHostOption = "127.0.0.1",
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
    cpu: CpuOption = None,
    pin: PinOption = True,
    instance_id: InstanceOption = None,
    lease_ttl: LeaseOption = 5,
    drain_timeout: DrainOption = 60.0,
    connect_timeout: ConnectOption = 30.0,
    engine_stall_timeout: StallOption = 60.0,
    transports: TransportsOption = None,
    kv_credits: KvCreditsOption = None,
    standing_links: StandingLinksOption = STANDING_LINKS,
    kv_port: KvPortOption = 0,
    http_port: HttpPortOption = 0,
    advertise_kv: AdvertiseKvOption = None,
) -> None:
    """Run one prefill worker that joins a cluster. Other flags go to vLLM."""
    _run(
        "prefill",
        context,
        model=model,
        host=host,
        state_dir=state_dir,
        etcd=etcd,
        nats=nats,
        namespace=namespace,
        security=security,
        cpu=cpu,
        pin=pin,
        instance_id=instance_id,
        lease_ttl_s=lease_ttl,
        drain_timeout_s=drain_timeout,
        connect_timeout_s=connect_timeout,
        engine_stall_s=engine_stall_timeout,
        transports=transports,
        kv_credits=kv_credits,
        standing_links=standing_links,
        kv_port=kv_port,
        http_port=http_port,
        advertise_kv=advertise_kv,
    )


def frontend(
    context: typer.Context,
    model: ModelOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
    instance_id: InstanceOption = None,
    lease_ttl: LeaseOption = 5,
    drain_timeout: DrainOption = 60.0,
    connect_timeout: ConnectOption = 30.0,
    max_inflight: InflightOption = 1024,
    restart_wait: RestartWaitOption = 0.0,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Publish this address instead of the bound one, e.g. https://h:443"
        ),
    ] = None,
) -> None:
    """Run one HTTP frontend that joins a cluster. Other flags go to vLLM."""
    _run(
        "frontend",
        context,
        model=model,
        host=host,
        port=port,
        state_dir=state_dir,
        etcd=etcd,
        nats=nats,
        namespace=namespace,
        security=security,
        instance_id=instance_id,
        lease_ttl_s=lease_ttl,
        drain_timeout_s=drain_timeout,
        connect_timeout_s=connect_timeout,
        max_inflight=max_inflight,
        restart_wait_s=restart_wait,
        advertise=advertise,
    )
