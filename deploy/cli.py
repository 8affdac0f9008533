"""The `pullfill` command: reads the command line and calls one function for each command.

    @command(app)
    def status(cluster: ClusterOptions, as_json: JsonOption = False) -> int: ...

Each field of an options class is a flag (pullfill/options.py). Other parameters are typer's own.
Large modules are imported inside the commands, so that `--help` answers at once. A `PullfillError`
becomes one `error:` line. Exit code 1: the command failed. 2: wrong command line, or incompatible
peer.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from pullfill.errors import ConfigError, PullfillError, exit_code
from pullfill.options import (
    ClusterOptions,
    Flag,
    FrontendOptions,
    RoleOptions,
    StateDirOptions,
    UpOptions,
    WorkerOptions,
    declared,
)
from pullfill.runtime.log import DEBUG_ENV, complain
from pullfill.wire import WorkerRole

# --------------------------------------------------------------------------- options classes

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that hand unknown flags to vLLM."""


def command(
    app: typer.Typer, name: str | None = None, *, vllm: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add the function to `app` as a command.

    name: of the command, if it is not the function's.
    vllm: unknown flags are for vLLM. The function finds them in `context.args`."""

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        called = name or function.__name__
        settings = PASS_THROUGH if vllm else None
        app.command(called, context_settings=settings)(expanded(function, called))
        return function

    return decorate


def expanded(function: Callable[..., int], called: str) -> Callable[..., None]:
    """Return `function` with a parameter for each flag of its options classes."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[type, list[Flag]]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters[parameter.name] = parameter.replace(annotation=kind, kind=_BY_NAME)
            continue
        assert isinstance(kind, type)
        groups[parameter.name] = kind, list(flags_of(kind, called))
        for one in groups[parameter.name][1]:
            parameters.setdefault(_key(one), _typer_parameter(one))

    def run(**given: Any) -> None:
        plain = {name: value for name, value in given.items() if name in hints}
        for name, (kind, flags) in groups.items():
            plain[name] = kind(**{one.field: one.parse(given[_key(one)]) for one in flags})
        if code := function(**plain):
            raise typer.Exit(code)

    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {key: p.annotation for key, p in parameters.items()}
    return run


def flags_of(options: type, called: str) -> Iterator[Flag]:
    """Yield those flags of an options class that the command `called` has."""
    for_children = called == "up" and issubclass(options, RoleOptions)
    for one in declared(options):
        if one.up if for_children else one.role in ("", called):
            yield one


_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def _key(one: Flag) -> str:
    """Return the name of the flag's value: `kv_mode` for `--kv-mode`."""
    return one.name.partition("/")[0].lstrip("-").replace("-", "_")


def _typer_parameter(one: Flag) -> inspect.Parameter:
    option = typer.Option(
        one.name,
        metavar=one.metavar,
        min=one.least,
        max=one.most,
        help=one.help,
        envvar=one.env,
        show_envvar=False,
        show_default=one.default != "",
        hidden=one.hidden,
    )
    # The default of a flag that is parsed stands in its help.
    default = None if one.given else one.default
    return inspect.Parameter(
        _key(one), _BY_NAME, default=default, annotation=Annotated[one.type, option]
    )


# --------------------------------------------------------------------------- the command

app = typer.Typer(
    name="pullfill",
    help="Pull-based disaggregated LLM serving on stock vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(
    help="Read or change router and queue settings; running workers follow at once.",
    no_args_is_help=True,
)
app.add_typer(config_app, name="config")
suspects_app = typer.Typer(
    help="Requests that are refused because decode workers died with them.",
    invoke_without_command=True,
)
app.add_typer(suspects_app, name="suspects")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]


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


# --------------------------------------------------------------------------- this machine


def _from_file(context: typer.Context, path: str | None) -> str | None:
    """Take the values of the file for those of flags that are not given."""
    if path is not None and not context.resilient_parsing:
        from pullfill.deploy import cluster_file

        own = own_flags(context, "up", "decode", "prefill")
        kinds = (UpOptions, ClusterOptions, WorkerOptions, FrontendOptions)
        parsers = {flag.name: flag.parse for kind in kinds for flag in flags_of(kind, "up")}
        context.default_map = cluster_file.read(path, context, own, parsers)
    return path


@command(app, vllm=True)
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

    options = replace(options, workers=workers, frontend=frontend, settings=settings or [])
    options = command_up.completed(
        options,
        cluster,
        own_flags(context, "up", "decode", "prefill"),
        {"--vllm-args": vllm_args, "--decode-args": decode_args, "--prefill-args": prefill_args},
        context.args,
    )
    return command_up.up(options, cluster.state_dir, detach=detach)


def own_flags(context: typer.Context, *commands: str) -> set[str]:
    """Return every flag of these commands of pullfill, e.g. `--port`."""
    group: Any = context.find_root().command
    params = [param for name in commands for param in group.commands[name].params]
    flags = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    return flags | set(context.help_option_names)


@command(app)
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


@command(app)
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


# --------------------------------------------------------------------------- joining


@command(app, vllm=True)
def decode(context: typer.Context, options: WorkerOptions, cluster: ClusterOptions) -> int:
    """Run one decode worker that joins a cluster. Other flags go to vLLM."""
    from pullfill.deploy import run_role

    return run_role.run_worker("decode", options, cluster, context.args)


@command(app, vllm=True)
def prefill(context: typer.Context, options: WorkerOptions, cluster: ClusterOptions) -> int:
    """Run one prefill worker that joins a cluster. Other flags go to vLLM."""
    from pullfill.deploy import run_role

    return run_role.run_worker("prefill", options, cluster, context.args)


@command(app, vllm=True)
def frontend(context: typer.Context, options: FrontendOptions, cluster: ClusterOptions) -> int:
    """Run one HTTP frontend that joins a cluster. Other flags go to vLLM."""
    from pullfill.deploy import run_role

    return run_role.run_frontend(options, cluster, context.args)


# --------------------------------------------------------------------------- a running cluster


@command(app)
def status(
    cluster: ClusterOptions,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask only the frontend at this URL")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show workers, their load, and the job queue."""
    from pullfill.deploy.status import status

    return status(cluster.find_to_ask(url), url, as_json)


@command(app)
def top(
    cluster: ClusterOptions,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask the frontend at this URL")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen")] = False,
    instance: Annotated[
        str | None, typer.Argument(metavar="[INSTANCE_ID]", help="One worker, with its history")
    ] = None,
) -> int:
    """Watch workers, requests and latencies in the terminal. `q` ends it.

    Shows what a frontend shows at /pullfill/ui, to administrators only.
    """
    from pullfill.deploy.top import top

    return top(cluster.find_to_ask(url), url, once, instance)


@command(app)
def requests(
    cluster: ClusterOptions,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask only the frontend at this URL")
    ] = None,
    most: Annotated[
        int, typer.Option("--most", metavar="N", min=1, help="Show at most N requests")
    ] = 25,
    as_json: JsonOption = False,
) -> int:
    """List the latest requests that have ended. `pullfill explain` shows one.

    Shows what frontends show at /pullfill/ui, to administrators only.
    """
    from pullfill.deploy import top

    return top.requests(cluster.find_to_ask(url), url, most, as_json)


@command(app)
def plan(
    cluster: ClusterOptions,
    as_json: JsonOption = False,
    watch: Annotated[
        float, typer.Option(metavar="S", min=0, help="Look again every S seconds")
    ] = 0.0,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Change the roles of --elastic workers, one at a time"),
    ] = False,
    min_decode: Annotated[
        int, typer.Option(metavar="N", min=1, help="--apply keeps at least N decode workers")
    ] = 1,
    min_prefill: Annotated[
        int, typer.Option(metavar="N", min=0, help="--apply keeps at least N prefill workers")
    ] = 0,
    cool_down: Annotated[
        float,
        typer.Option(metavar="S", min=0, help="--apply waits at least S seconds after a change"),
    ] = 20.0,
    prefill_use: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0.05, max=1, help="Share of time a prefill worker should work"
        ),
    ] = 0.7,
    decode_use: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0.05, max=1, help="How full a decode worker should be; 1: full"
        ),
    ] = 0.8,
) -> int:
    """Say how many prefill and decode workers are right, and why.

    With --apply this command runs until you interrupt it, and looks every 5 s.
    A change of role must be right for 10 s. A change in the other direction
    waits for 120 s.
    """
    from pullfill.deploy import planner
    from pullfill.deploy.planner import PlanSettings

    settings = PlanSettings(
        prefill_use=prefill_use,
        decode_use=decode_use,
        cool_down_s=cool_down,
        reverse_s=max(120.0, cool_down),
        min_decode=min_decode,
        min_prefill=min_prefill,
    )
    ref = cluster.find_to_ask()
    return planner.show(ref, settings, as_json=as_json, watch_s=watch, apply=apply)


@command(app)
def drain(
    cluster: ClusterOptions,
    instance: Annotated[str, typer.Argument(metavar="INSTANCE_ID")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is gone")] = False,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="Longest --wait, in seconds")
    ] = 120.0,
) -> int:
    """Let one worker finish what it has and leave, by revoking its lease."""
    from pullfill.deploy import operate

    return operate.drain(cluster.find_to_ask(), instance, wait=wait, timeout_s=timeout)


@command(app)
def role(
    cluster: ClusterOptions,
    instance: Annotated[str, typer.Argument(metavar="INSTANCE_ID")],
    wanted: Annotated[WorkerRole, typer.Argument(metavar="prefill|decode|both")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the worker has the role")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="Longest --wait, in seconds")
    ] = 120.0,
    force: Annotated[
        bool, typer.Option("--force", help="Do so even if no decode worker is left")
    ] = False,
) -> int:
    """Change the role of a worker that runs with --elastic, without loading the model again.

    The worker takes no new work, finishes what it has, and then works in its
    new role. A worker that is `both` decodes, and prefills for others while its
    own streams leave time.
    """
    from pullfill.deploy import operate

    return operate.change_role(
        cluster.find_to_ask(), instance, wanted, wait_s=timeout if wait else None, force=force
    )


@command(app)
def explain(
    cluster: ClusterOptions,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="`id` of the answer, or X-Request-Id")
    ],
    as_json: JsonOption = False,
) -> int:
    """Tell how one request was served and where its time went, or why it failed."""
    from pullfill.deploy.explain import explain

    return explain(cluster.find_to_ask(), request, as_json)


@command(app)
def doctor(cluster: ClusterOptions) -> int:
    """Check this machine and the cluster, and say what to do about what is wrong."""
    from pullfill.deploy import doctor as checks

    return checks.run(cluster)


@command(app)
def recheck(cluster: ClusterOptions) -> int:
    """Forget failed self-checks, so that workers compare their prefills again."""
    from pullfill.deploy import operate

    return operate.recheck(cluster.find_to_ask())


@command(config_app, "get")
def config_get(
    cluster: ClusterOptions,
    key: Annotated[str | None, typer.Argument(metavar="[router.KEY|queue.KEY]")] = None,
) -> int:
    """Print one setting, or all."""
    from pullfill.deploy import operate

    return operate.config_get(cluster.find_to_ask(), key)


@command(config_app, "set")
def config_set(
    cluster: ClusterOptions,
    key: Annotated[str, typer.Argument(metavar="router.KEY|queue.KEY")],
    value: Annotated[str, typer.Argument(metavar="VALUE")],
) -> int:
    """Change one setting, or `unset` it; a bad value is refused."""
    from pullfill.deploy import operate

    return operate.config_set(cluster.find_to_ask(), key, value)


def _suspects(context: typer.Context, cluster: ClusterOptions, as_json: JsonOption = False) -> int:
    if context.invoked_subcommand is None:
        from pullfill.deploy import operate

        operate.show_suspects(cluster.find_to_ask(), as_json)
    return 0


suspects_app.callback()(expanded(_suspects, "suspects"))


@command(suspects_app, "clear")
def suspects_clear(
    cluster: ClusterOptions,
    fingerprint: Annotated[str | None, typer.Argument(metavar="[FINGERPRINT]")] = None,
    every: Annotated[bool, typer.Option("--all", help="Allow all refused requests again")] = False,
) -> int:
    """Allow a refused request again, at all frontends."""
    if (fingerprint is None) != every:
        raise ConfigError("name one FINGERPRINT (`pullfill suspects` lists them), or --all")
    from pullfill.deploy import operate

    operate.clear_suspects(cluster.find_to_ask(), fingerprint)
    return 0


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
        sys.exit(exit_code(exc))
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
