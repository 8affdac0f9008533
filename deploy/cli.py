"""The `pullfill` command. Thin: it reads the command line and calls one function per command.

Imports of everything heavy happen inside the commands, so that `--help` answers at once. A
`PullfillError` becomes one `error:` line; exit code 1 means it failed, 2 that it was asked wrongly.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

from pullfill.deploy import cli_roles, cli_suspects
from pullfill.deploy.options import (
    PASS_THROUGH,
    DrainOption,
    EtcdOption,
    InflightOption,
    JsonOption,
    KvDigestOption,
    KvModeOption,
    NamespaceOption,
    NatsOption,
    PinOption,
    SecurityOption,
    StallOption,
    StateDirOption,
    TransportsOption,
    find_cluster,
    own_options,
)
from pullfill.errors import ConfigError, IncompatibleError, PullfillError
from pullfill.runtime.log import DEBUG_ENV, complain
from pullfill.wire import DigestMode, KvMode

app = typer.Typer(
    name="pullfill",
    help="Pull-based disaggregated LLM serving on stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(
    help="Read or change router and queue settings; running workers follow at once.",
    no_args_is_help=True,
)
app.add_typer(config_app, name="config")
app.add_typer(cli_suspects.app, name="suspects")


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
    security: SecurityOption = None,
    pin: PinOption = True,
    drain_timeout: DrainOption = 60.0,
    engine_stall_timeout: StallOption = 60.0,
    max_inflight: InflightOption = 1024,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", metavar="S", min=1, help="Longest start, seconds")
    ] = 600.0,
    kv_digest: KvDigestOption = DigestMode.OFF,
    kv_mode: KvModeOption = KvMode.PUSH_ASYNC,
    transports: TransportsOption = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start again what dies")
    ] = True,
    decode_args: Annotated[
        str | None,
        typer.Option(metavar="FLAGS", help='vLLM flags of decode workers only, e.g. "-tp 2"'),
    ] = None,
    prefill_args: Annotated[
        str | None, typer.Option(metavar="FLAGS", help="vLLM flags of prefill workers only")
    ] = None,
) -> None:
    """Start a cluster on this machine: NATS, etcd, workers and frontends.

    Flags not listed here go to vLLM, e.g. --max-model-len 8192.
    """
    from pullfill.deploy import flags, run_up
    from pullfill.deploy.plan import UpOptions
    from pullfill.net.security import load

    own = own_options(context, "up", "decode", "prefill")
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
        security=load(security),
        pin=pin,
        restart=restart,
        drain_timeout_s=drain_timeout,
        engine_stall_s=engine_stall_timeout,
        max_inflight=max_inflight,
        ready_timeout_s=ready_timeout,
        kv_digest=kv_digest,
        kv_mode=kv_mode,
        transports=transports,
        vllm_args=list(context.args),
        role_args={
            "decode": flags.of_role("--decode-args", decode_args, own),
            "prefill": flags.of_role("--prefill-args", prefill_args, own),
        },
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


@app.command()
def status(
    as_json: JsonOption = False,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Show workers, their load, and the job queue."""
    from pullfill.deploy import report

    ref = find_cluster(state_dir, etcd, nats, namespace, security)
    raise typer.Exit(report.status(ref, as_json))


@app.command()
def drain(
    instance: Annotated[str, typer.Argument(metavar="INSTANCE_ID")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is gone")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", min=0, help="Of --wait")] = 120.0,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Let one worker finish what it has and leave, by revoking its lease."""
    from pullfill.deploy import operate

    ref = find_cluster(state_dir, etcd, nats, namespace, security)
    raise typer.Exit(operate.drain(ref, instance, wait=wait, timeout_s=timeout))


@app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="`id` of the response")],
    as_json: JsonOption = False,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Tell how one request was served, and where its time went."""
    from pullfill.deploy import report

    ref = find_cluster(state_dir, etcd, nats, namespace, security)
    raise typer.Exit(report.explain(ref, request, as_json))


@app.command()
def doctor(
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Check this machine and the cluster, and say what to do about what is wrong."""
    from pullfill.deploy import doctor as checks

    raise typer.Exit(checks.run((state_dir, etcd, nats, namespace, security)))


@app.command()
def recheck(
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Forget failed self-checks, so that workers compare their prefills again."""
    from pullfill.deploy import recheck

    ref = find_cluster(state_dir, etcd, nats, namespace, security)
    raise typer.Exit(recheck.recheck(ref))


@config_app.command("get")
def config_get(
    key: Annotated[str | None, typer.Argument(metavar="[router.KEY|queue.KEY]")] = None,
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Print one setting, or all."""
    from pullfill.deploy import operate

    ref = find_cluster(state_dir, etcd, nats, namespace, security)
    raise typer.Exit(operate.config_get(ref, key))


@config_app.command("set")
def config_set(
    key: Annotated[str, typer.Argument(metavar="router.KEY|queue.KEY")],
    value: Annotated[str, typer.Argument(metavar="VALUE")],
    state_dir: StateDirOption = None,
    etcd: EtcdOption = None,
    nats: NatsOption = None,
    namespace: NamespaceOption = None,
    security: SecurityOption = None,
) -> None:
    """Change one setting, or `unset` it; a bad value is refused."""
    from pullfill.deploy import operate

    ref = find_cluster(state_dir, etcd, nats, namespace, security)
    raise typer.Exit(operate.config_set(ref, key, value))


cli_roles.register(app)


def _in_words(exc: OSError) -> str:
    """Return what the system refused, and what to do about it."""
    what = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc.strerror)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}. Free some space, or choose another disk: --state-dir DIR"
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{what}. Choose a directory you may write to: --state-dir DIR for a cluster, "
            "XDG_CACHE_HOME for the demo model"
        )
    return f"{what}. {DEBUG_ENV}=1 shows where"


def main() -> NoReturn:
    """Entry of the `pullfill` script. Never returns."""
    try:
        app()
    except PullfillError as exc:
        complain(exc)
        sys.exit(2 if isinstance(exc, ConfigError | IncompatibleError) else 1)
    except OSError as exc:
        if exc.errno is None:
            raise
        complain(exc, _in_words(exc))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
