"""Makes commands of functions: their parameters are options classes, each field a flag.

    @command(app)
    def status(cluster: ClusterOptions, as_json: JsonOption = False) -> int: ...

Other parameters are typer's own. The function returns the command's exit code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from pullfill.options import Flag, RoleOptions, declared

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
