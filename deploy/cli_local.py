"""The commands about a cluster of this machine: `pullfill up`, `down`, `logs` and the like."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from pullfill.deploy.command import command, flags_of
from pullfill.options import (
    ClusterOptions,
    FrontendOptions,
    StateDirOptions,
    UpOptions,
    WorkerOptions,
)


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    command(app, vllm=True)(up)
    command(app)(down)
    command(app)(logs)


def _from_file(context: typer.Context, path: str | None) -> str | None:
    """Take the values of the file for those of flags that are not given."""
    if path is not None and not context.resilient_parsing:
        from pullfill.deploy import cluster_file

        own = own_flags(context, "up", "decode", "prefill")
        kinds = (UpOptions, ClusterOptions, WorkerOptions, FrontendOptions)
        parsers = {flag.name: flag.parse for kind in kinds for flag in flags_of(kind, "up")}
        context.default_map = cluster_file.read(path, context, own, parsers)
    return path


def up(
    context: typer.Context,
    options: UpOptions,
    cluster: ClusterOptions,
    workers: WorkerOptions,
    frontend: FrontendOptions,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            is_eager=True,
            callback=_from_file,
            help="YAML file with these flags as keys, without --, e.g. `decode: 2`. "
            "Command-line flags win",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once all is ready")] = False,
    vllm_args: Annotated[
        str | None,
        typer.Option(metavar="FLAGS", help="vLLM flags of all processes, as one text. For --file"),
    ] = None,
    decode_args: Annotated[
        str | None,
        typer.Option(metavar="FLAGS", help='vLLM flags of decode workers only, e.g. "-tp 2"'),
    ] = None,
    prefill_args: Annotated[
        str | None, typer.Option(metavar="FLAGS", help="vLLM flags of prefill workers only")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting, as of `pullfill config set`. Stored before workers start. Repeatable",
        ),
    ] = None,
) -> int:
    """Start a cluster on this machine: NATS, etcd, workers and frontends.

    Flags not listed here go to vLLM, e.g. --max-model-len 8192.
    """
    from pullfill.deploy import up as command_up
    from pullfill.deploy import vllm_flags
    from pullfill.net.security import load

    own = own_flags(context, "up", "decode", "prefill")
    of_decode = vllm_flags.of_role("--decode-args", decode_args, own)
    options = replace(
        options,
        namespace=cluster.namespace or "default",
        etcd_url=cluster.etcd,
        nats_url=cluster.nats,
        security=load(cluster.security),
        workers=workers,
        frontend=frontend,
        settings=settings or [],
        vllm_args=[*vllm_flags.of_role("--vllm-args", vllm_args, own), *context.args],
        role_args={
            "decode": of_decode,
            "frontend": vllm_flags.for_frontend(of_decode),
            "prefill": vllm_flags.of_role("--prefill-args", prefill_args, own),
        },
    )
    return command_up.up(options, cluster.state_dir, detach=detach)


def own_flags(context: typer.Context, *commands: str) -> set[str]:
    """Return every flag of these commands of pullfill, e.g. `--port`."""
    group: Any = context.find_root().command
    params = [param for name in commands for param in group.commands[name].params]
    flags = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    return flags | set(context.help_option_names)


def down(
    cluster: StateDirOptions,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0,
            help="How long workers, and then frontends, may finish streams  "
            "[default: their --drain-timeout]",
        ),
    ] = None,
) -> int:
    """Drain and stop the cluster of a state directory."""
    from pullfill.deploy import down as command_down

    return command_down.down(cluster.state_dir, timeout_s=timeout)


def logs(
    cluster: StateDirOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A process, a role or an instance id")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="Last lines of each process")
    ] = 20,
) -> int:
    """Print the logs of the cluster of a state directory."""
    from pullfill.deploy import logs as command_logs

    return command_logs.show(cluster.state_dir, name, lines=lines, follow=follow)
