"""The `pullfill` command. Thin: it reads the command line and calls one function per command.

Imports of everything heavy happen inside the commands, so that `--help` answers at once. A
`PullfillError` becomes one `error:` line; exit code 1 means it failed, 2 that it was asked wrongly.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from pullfill.deploy.options import (
    PASS_THROUGH,
    EtcdOption,
    JsonOption,
    NamespaceOption,
    NatsOption,
    StateDirOption,
    find_cluster,
)
from pullfill.errors import ConfigError, IncompatibleError, PullfillError

DEBUG_ENV = "PULLFILL_DEBUG"

app = typer.Typer(
    name="pullfill",
    help="Pull-based disaggregated LLM serving on stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(
    help="Read or change the router's settings; running workers follow at once.",
    no_args_is_help=True,
)
app.add_typer(config_app, name="config")

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="PATH|demo", help="Checkpoint directory, hub name, or the demo model"
    ),
]
HostOption = Annotated[str, typer.Option("--host", metavar="H", help="Address to bind")]
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


def _version(wanted: bool) -> None:
    if wanted:
        from pullfill import __version__

        typer.echo(f"pullfill {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_ENV] = "1"


@app.command(context_settings=PASS_THROUGH)
def up(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(metavar="PATH|demo", help="Checkpoint directory, hub name, or demo")
    ] = "demo",
    decode: Annotated[int, typer.Option(metavar="N", min=0, help="Decode workers")] = 1,
    prefill: Annotated[int, typer.Option(metavar="N", min=0, help="Prefill workers")] = 1,
    frontends: Annotated[int, typer.Option(metavar="N", min=0, help="HTTP frontends")] = 1,
    host: Annotated[str, typer.Option(metavar="H", help="Where frontends listen")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the first frontend; 0: any free one")
    ] = 8000,
    state_dir: StateDirOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once all is ready")] = False,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    pin: PinOption = True,
    drain_timeout: DrainOption = 60.0,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", metavar="S", min=1, help="Longest start, seconds")
    ] = 600.0,
) -> None:
    """Start a cluster on this machine: NATS, etcd, workers and frontends.

    Flags not listed here go to vLLM, e.g. --max-model-len 8192.
    """
    from pullfill.deploy import run_up
    from pullfill.deploy.plan import UpOptions

    options = UpOptions(
        model=model,
        decode=decode,
        prefill=prefill,
        frontends=frontends,
        host=host,
        port=port,
        namespace=namespace or "default",
        etcd_url=etcd,
        nats_url=nats,
        pin=pin,
        drain_timeout_s=drain_timeout,
        ready_timeout_s=ready_timeout,
        vllm_args=list(context.args),
    )
    raise typer.Exit(run_up.up(options, state_dir, detach=detach))


@app.command()
def down(
    state_dir: StateDirOption = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="How long workers may finish their streams")
    ] = 60.0,
) -> None:
    """Drain and stop the cluster of a state directory."""
    from pullfill.deploy import run_up

    raise typer.Exit(run_up.down(state_dir, timeout_s=timeout))


def _worker(
    role: str,
    context: typer.Context,
    cluster: tuple[str | None, str | None, str | None, str | None],
    model: str | None,
    host: str,
    instance_id: str | None,
    cpu: str | None,
    pin: bool,
    times: tuple[int, float, float],
) -> NoReturn:
    from pullfill.deploy import roles

    code = roles.run_worker(
        role,
        roles.RoleCommand(
            cluster=cluster,
            model=model,
            host=host,
            instance_id=instance_id,
            cpu=cpu,
            pin=pin,
            lease_ttl_s=times[0],
            drain_timeout_s=times[1],
            connect_timeout_s=times[2],
            vllm_args=list(context.args),
        ),
    )
    raise typer.Exit(code)


@app.command(context_settings=PASS_THROUGH)
def decode(
    context: typer.Context,
    model: ModelOption = None,
    host: HostOption = "127.0.0.1",
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    cpu: CpuOption = None,
    pin: PinOption = True,
    instance_id: InstanceOption = None,
    lease_ttl: LeaseOption = 5,
    drain_timeout: DrainOption = 60.0,
    connect_timeout: ConnectOption = 30.0,
) -> None:
    """Run one decode worker that joins a cluster. Other flags go to vLLM."""
    where = (state_dir, etcd, nats, namespace)
    times = (lease_ttl, drain_timeout, connect_timeout)
    _worker("decode", context, where, model, host, instance_id, cpu, pin, times)


@app.command(context_settings=PASS_THROUGH)
def prefill(
    context: typer.Context,
    model: ModelOption = None,
    host: HostOption = "127.0.0.1",
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    cpu: CpuOption = None,
    pin: PinOption = True,
    instance_id: InstanceOption = None,
    lease_ttl: LeaseOption = 5,
    drain_timeout: DrainOption = 60.0,
    connect_timeout: ConnectOption = 30.0,
) -> None:
    """Run one prefill worker that joins a cluster. Other flags go to vLLM."""
    where = (state_dir, etcd, nats, namespace)
    times = (lease_ttl, drain_timeout, connect_timeout)
    _worker("prefill", context, where, model, host, instance_id, cpu, pin, times)


@app.command(context_settings=PASS_THROUGH)
def frontend(
    context: typer.Context,
    model: ModelOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    instance_id: InstanceOption = None,
    lease_ttl: LeaseOption = 5,
    drain_timeout: DrainOption = 60.0,
    connect_timeout: ConnectOption = 30.0,
) -> None:
    """Run one HTTP frontend that joins a cluster. Other flags go to vLLM."""
    from pullfill.deploy import roles

    command = roles.RoleCommand(
        cluster=(state_dir, etcd, nats, namespace),
        model=model,
        host=host,
        port=port,
        instance_id=instance_id,
        lease_ttl_s=lease_ttl,
        drain_timeout_s=drain_timeout,
        connect_timeout_s=connect_timeout,
        vllm_args=list(context.args),
    )
    raise typer.Exit(roles.run_frontend(command))


@app.command()
def status(
    as_json: JsonOption = False,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Show workers, their load, and the job queue."""
    from pullfill.deploy import report

    raise typer.Exit(report.status(find_cluster(state_dir, etcd, nats, namespace), as_json))


@app.command()
def drain(
    instance: Annotated[str, typer.Argument(metavar="INSTANCE_ID")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is gone")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", min=0, help="Of --wait")] = 120.0,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Let one worker finish what it has and leave, by revoking its lease."""
    from pullfill.deploy import operate

    ref = find_cluster(state_dir, etcd, nats, namespace)
    raise typer.Exit(operate.drain(ref, instance, wait=wait, timeout_s=timeout))


@app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="`id` of the response")],
    as_json: JsonOption = False,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Tell how one request was served, and where its time went."""
    from pullfill.deploy import report

    ref = find_cluster(state_dir, etcd, nats, namespace)
    raise typer.Exit(report.explain(ref, request, as_json))


@app.command()
def doctor(
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Check this machine and the cluster, and say what to do about what is wrong."""
    from pullfill.deploy import doctor as checks

    raise typer.Exit(checks.run((state_dir, etcd, nats, namespace)))


@config_app.command("get")
def config_get(
    key: Annotated[str | None, typer.Argument(metavar="[router.KEY]")] = None,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Print one setting, or all."""
    from pullfill.deploy import operate

    raise typer.Exit(operate.config_get(find_cluster(state_dir, etcd, nats, namespace), key))


@config_app.command("set")
def config_set(
    key: Annotated[str, typer.Argument(metavar="router.KEY")],
    value: Annotated[str, typer.Argument(metavar="VALUE")],
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Change one setting; a bad value is refused."""
    from pullfill.deploy import operate

    raise typer.Exit(operate.config_set(find_cluster(state_dir, etcd, nats, namespace), key, value))


def main() -> NoReturn:
    """Entry of the `pullfill` script. Never returns."""
    try:
        app()
    except PullfillError as exc:
        if os.environ.get(DEBUG_ENV):
            raise
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(2 if isinstance(exc, ConfigError | IncompatibleError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
