"""The `pullfill` command: a table of commands, each a function of a module of deploy/.

The function's parameters are its flags: one for each field of an options class that is a `flag`
(pullfill/options.py), and one for each parameter with a `Flag`. `ref: ClusterRef` and
`state: StateDir` have the flags that find a cluster. `vllm_args` gets the flags that are not ours,
`role` the name of the command.
A module is imported when its command is called, so that `--help` answers at once. A `PullfillError`
becomes one `error:` line. Exit code 1: the command failed. 2: wrong command line, or incompatible
peer.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import is_dataclass, replace
from enum import Enum
from functools import cached_property
from importlib import import_module
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import click

from pullfill import __version__
from pullfill.config import ClusterRef
from pullfill.deploy.state import StateDir
from pullfill.errors import PullfillError, exit_code
from pullfill.options import ClusterOptions, Flag, RoleOptions, StateDirOptions, declared
from pullfill.runtime.log import DEBUG_ENV, complain

COMMANDS = {
    "up": ("up.command", "Start a cluster on this machine: NATS, etcd, workers and frontends."),
    "down": ("down.down", "Drain and stop the cluster of a state directory."),
    "logs": ("logs.show", "Print the logs of `up`: of one process, role or instance id, or all."),
    "worker": (
        "run_role.run_worker",
        "Run one worker that joins a cluster. It decodes, and prefills for others.",
    ),
    "decode": ("run_role.run_worker", "Run one decode worker that joins a cluster."),
    "prefill": ("run_role.run_worker", "Run one prefill worker that joins a cluster."),
    "frontend": ("run_role.run_frontend", "Run one HTTP frontend that joins a cluster."),
    "status": ("status.status", "Show workers, their load, and the job queue."),
    "top": (
        "top.top",
        "Watch workers, requests and latencies in the terminal, until Ctrl-C.\n\n"
        "Shows what a frontend shows at /pullfill/ui, to administrators only.",
    ),
    "page": (
        "top.page",
        "Serve the live page where no frontend runs: workers, the queue, and requests.\n\n"
        "Answers administrators only, as a frontend's /pullfill/ui does.",
    ),
    "plan": (
        "planner.show",
        "Say how many workers are right, and why.",
    ),
    "drain": (
        "operate.drain",
        "Let one worker finish what it has and leave, by revoking its lease.",
    ),
    "explain": (
        "explain.explain",
        "Tell how one request was served and where its time went, or why it failed.\n\n"
        "REQUEST_ID is the `id` of its answer, or its X-Request-Id.",
    ),
    "doctor": (
        "doctor.run",
        "Check this machine and the cluster, and say what to do about what is wrong.",
    ),
    "recheck": (
        "operate.recheck",
        "Forget failed self-checks, so that workers compare their prefills again.",
    ),
    "config get": ("operate.config_get", "Print one setting, or all."),
    "config set": (
        "operate.config_set",
        "Change one setting, or `unset` it; a bad value is refused.",
    ),
    "suspects": (
        "operate.suspects",
        "List requests that are refused because decode workers died with them.\n\n"
        "`suspects clear` allows one again at all frontends, or --all.",
    ),
}
# Commands whose other flags go to vLLM.
FOR_VLLM = ("up", "worker", "decode", "prefill", "frontend")


class Command(click.Command):
    """A command of the table. where: `module.function`."""

    def __init__(self, name: str, where: str, help: str) -> None:
        other = "\n\nOther flags go to vLLM, e.g. --max-model-len 8192."
        brief = help.partition("\n")[0]
        super().__init__(name, help=help + other * (name in FOR_VLLM), short_help=brief)
        self.ignore_unknown_options = self.allow_extra_args = name in FOR_VLLM
        self._where = where

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self._own, *super().get_params(ctx)]

    @cached_property
    def _own(self) -> list[click.Parameter]:
        # `up` has some flags in two classes: of workers and of frontends.
        found = {one.field: _click_parameter(one) for *_, flags in self._parts() for one in flags}
        return [*([_file()] if self.name == "up" else []), *found.values()]

    def invoke(self, ctx: click.Context) -> None:
        values: dict[str, Any] = {}
        if self.allow_extra_args:
            values["vllm_args"] = [*ctx.meta.get(_OF_FILE, ()), *ctx.args]
        if "role" in inspect.signature(self._function()).parameters:
            values["role"] = self.name
        for name, kind, flags in self._parts():
            given = {one.field: one.parse(ctx.params[one.field]) for one in flags}
            if kind is ClusterRef:
                values[name] = ClusterOptions(**given).find_to_ask(ctx.params.get("url"))
            elif kind is StateDir:
                values[name] = StateDir(given["state_dir"])
            else:
                values[name] = given[name] if kind is None else kind(**given)
        code = self._function()(**values)
        if isinstance(code, Coroutine):
            code = asyncio.run(code)
        if code:
            ctx.exit(code)

    def _function(self) -> Callable[..., Any]:
        module, name = self._where.split(".")
        function: Callable[..., Any] = getattr(import_module(f"pullfill.deploy.{module}"), name)
        return function

    def _parts(self) -> Iterator[tuple[str, type | None, list[Flag]]]:
        """Yield each parameter of the function, its type if that has flags, and the flags."""
        function = self._function()
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            hint: Any = hints[name]
            options = {ClusterRef: ClusterOptions, StateDir: StateDirOptions}.get(hint, hint)
            if is_dataclass(options):
                assert isinstance(options, type)
                yield name, hint, list(self._flags_of(options))
            elif name not in ("vllm_args", "role"):
                kind, how = get_args(hint)
                default = None if parameter.default is parameter.empty else parameter.default
                called = how.name or "--" + name.removesuffix("_s").replace("_", "-")
                yield (
                    name,
                    None,
                    [replace(how, name=called, field=name, default=default, type=kind)],
                )

    def _flags_of(self, options: type) -> Iterator[Flag]:
        for_children = self.name == "up" and issubclass(options, RoleOptions)
        for one in declared(options):
            if one.up if for_children else one.fits(str(self.name)):
                yield one


def _click_parameter(one: Flag) -> click.Parameter:
    (kind,) = [each for each in get_args(one.type) if each is not NoneType] or [one.type]
    many = get_origin(kind) is list
    form: Any = get_args(kind)[0] if many else kind
    bounds: Any = (one.least, one.most)
    if issubclass(form, Enum):
        form = click.Choice(form, case_sensitive=False)  # its words are the lower-case names
    elif bounds != (None, None):
        form = (click.IntRange if kind is int else click.FloatRange)(*bounds)
    if not one.name.startswith("-"):
        needed = not one.name.startswith("[")
        return click.Argument([one.field], metavar=one.name, type=form, required=needed)
    default = one.default.value if isinstance(one.default, Enum) else one.default

    def refuse(_: click.Context, __: click.Parameter, value: Any) -> Any:
        one.parse(value)  # `invoke` makes the field's value
        return value

    return click.Option(
        [*one.name.split(), one.field],
        metavar=one.metavar,
        type=form,
        is_flag=kind is bool,
        multiple=many,
        help=one.help,
        envvar=one.env,
        callback=refuse,
        # The default of a flag that is parsed stands in its help.
        default=None if one.given else default,
        show_default=one.default != "",
        hidden=one.hidden,
    )


# Where a context keeps the flags of the file that are vLLM's.
_OF_FILE = "pullfill.file"


def _file() -> click.Option:
    """Return the flag `--file` of `up`. It is read first: other flags get their values from it."""

    def read(context: click.Context, _: click.Parameter, path: str | None) -> None:
        if path is not None and not context.resilient_parsing:
            from pullfill.deploy import cluster_file

            flags = [p for p in context.command.get_params(context) if isinstance(p, click.Option)]
            # `detach: false`: it has no such flag as --no-detach, which nobody needs.
            off = {f"--no-{name[2:]}" for p in flags if p.is_flag for name in p.opts}
            off -= {name for p in flags for name in p.secondary_opts}
            given = [word for word in cluster_file.arguments(path) if word not in off]
            parser = context.command.make_parser(context)
            values, theirs, _order = parser.parse_args(given)
            context.default_map, context.meta[_OF_FILE] = values, theirs

    return click.Option(
        ["--file", "-f"],
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=read,
        help="YAML file with these flags as keys, without --, e.g. `decode: 2`. Command-line flags "
        "win",
    )


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks")
@click.version_option(__version__, message="pullfill %(version)s")
def app(debug: bool) -> None:
    """Pull-based disaggregated LLM serving on stock vLLM."""
    if debug:
        os.environ[DEBUG_ENV] = "1"


@app.group()
def config() -> None:
    """Read or change router and queue settings."""


for _name, _command in COMMANDS.items():
    *_above, _own = _name.split()
    (config if _above else app).add_command(Command(_own, *_command))


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
        sys.exit(app.main(standalone_mode=False))
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except PullfillError as exc:
        complain(exc)
        sys.exit(exit_code(exc))
    except OSError as exc:
        if exc.errno is None:
            raise
        complain(exc, _in_words(exc))
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


if __name__ == "__main__":
    main()
