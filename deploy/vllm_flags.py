"""Reads the user's vLLM flags, and checks them before anything starts. A refusal is one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pullfill.config import NO_DATA_PARALLEL
from pullfill.errors import ConfigError
from pullfill.options import ClusterOptions, FrontendOptions, UpOptions, WorkerOptions, declared

_DATA_PARALLEL = re.compile(r"data-parallel\b|dp[a-z]?\Z|dp-supervisor\b")
_SIZE = ("data-parallel-size", "dp")
_FEW = 4
# Flags that are no fields of an options class.
_OF_UP = frozenset(
    ("--file", "--detach", "--vllm-args", "--decode-args", "--prefill-args", "--set", "--help")
)

# Flags of vLLM's API server that our frontend has no use for, and what to know instead.
_NOT_SERVED = {
    "api-server-count": "--frontends N starts several of them",
    "asc": "--frontends N starts several of them",
    "disable-access-log-for-endpoints": "--disable-uvicorn-access-log drops all of these lines",
    "grpc": "it speaks HTTP",
    "grpc-port": "it speaks HTTP",
    "h11-max-header-count": "h11 does not parse its requests",
    "h11-max-incomplete-event-size": "h11 does not parse its requests",
    "headless": "decode workers have no API server anyway",
    "uds": "it listens at --host and --port",
}
_ROLE_ARGS = ("decode-args", "prefill-args")
_SPECULATION = ("speculative-config", "sc", "spec-method", "spec-model", "spec-tokens")


def group_flags(arguments: Sequence[str]) -> list[list[str]]:
    """Return each flag with its values: ["--a", "1", "--b"] -> [["--a", "1"], ["--b"]].

    Raises ValueError for a value that no flag precedes."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            groups.append([argument])
        elif groups and "=" not in groups[-1][0]:
            groups[-1].append(argument)
        else:
            raise ValueError(argument)
    return groups


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def flag_name(flag: str) -> str:
    """Return the plain name of a flag: `--no-a_b=1` -> `a-b`, `--config.key` -> `config`."""
    name = flag.split("=", 1)[0].partition(".")[0]
    return name.lstrip("-").replace("_", "-").removeprefix("no-")


def for_worker(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those that only an API server understands."""
    kept = (g for g in group_flags(arguments) if not _of_server(g[0]))
    return [part for group in kept for part in group]


def for_frontend(arguments: Sequence[str]) -> list[str]:
    """Return those flags of decode workers that a frontend must know: how they speculate."""
    # Without them vLLM's frontend has no metrics of drafts and checks no request against them.
    kept = (g for g in group_flags(arguments) if flag_name(g[0]) in _SPECULATION)
    return [part for group in kept for part in group]


def check(arguments: Sequence[str]) -> None:
    """Refuse stray words, flags that vLLM does not have, that pullfill sets itself, and flags that
    workers or frontends do not support. Raises ConfigError."""
    try:
        groups = group_flags(arguments)
    except ValueError as exc:
        raise ConfigError(
            f"unexpected argument {exc.args[0]!r}: vLLM flags are given as --flag value"
        ) from None
    for flag, *values in groups:
        given, _, joined = flag.partition("=")
        _check_name(given)
        name = flag_name(given)
        if name == "kv-transfer-config":
            raise ConfigError(
                f"{given} is pullfill's own to set: remove it. To keep more KV in CPU memory use "
                "--kv-offloading-size"
            )
        if name in _NOT_SERVED and not given.startswith("--no-"):
            raise ConfigError(f"{given}: not supported by pullfill's frontend: {_NOT_SERVED[name]}")
        alone = name in _SIZE and [joined or "", *values][-1] == "1"
        if _DATA_PARALLEL.match(name) and not alone:
            raise ConfigError(f"{given}: {NO_DATA_PARALLEL}")


def of_pullfill() -> set[str]:
    """Return the flags of pullfill's commands that also take vLLM's."""
    kinds = (UpOptions, WorkerOptions, FrontendOptions, ClusterOptions)
    return {one.name.partition("/")[0] for kind in kinds for one in declared(kind)} | _OF_UP


def _check_name(flag: str) -> None:
    """Refuse what is no whole name of a flag of vLLM. Raises ConfigError."""
    # vLLM also takes the beginning of a name. Here all who look for a flag would have to know.
    theirs, _ = of_vllm()
    name = flag_name(flag)
    dashes = "--" if flag.startswith("--") else "-"
    if not theirs or f"{dashes}{name}" in theirs or flag.startswith("-O"):
        return  # without vLLM nothing starts: `machine.refuse_wrong_packages`
    ours = of_pullfill()
    if flag in ours:
        raise ConfigError(
            f"this command has no flag {flag}: see --help. Others of pullfill have it"
        )
    known = sorted(each for each in ours | theirs if each.startswith("--"))
    near = [long for long in known if long.startswith(f"--{name}")][:_FEW]
    near = near or get_close_matches(flag.replace("_", "-"), known, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists those of pullfill"
    raise ConfigError(f"neither pullfill nor vLLM has a flag {flag}: {hint}")


def check_plain_http(arguments: Sequence[str]) -> None:
    """Refuse TLS flags for `up`. Raises ConfigError."""
    # `up` knows no certificate to trust, so it could not ask whether a frontend is ready.
    for flag in (argument.split("=", 1)[0].replace("_", "-") for argument in arguments):
        if flag.startswith("--ssl-"):
            raise ConfigError(
                f"{flag}: the frontends of `up` speak plain HTTP. Start the rest with `pullfill up "
                f"--frontends 0`, then `pullfill frontend {flag} ...` by hand"
            )


def of_role(option: str, text: str | None) -> list[str]:
    """Return the vLLM flags in the value of `--decode-args` or the like.

    Options of pullfill are refused. So are, among the flags of one role, those of vLLM's API
    server, which workers do not have. Raises ConfigError, one line."""
    try:
        arguments = shlex.split(text or "")
    except ValueError as exc:
        raise ConfigError(f"{option} {text!r} cannot be read ({exc}): check its quotes") from None
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name in of_pullfill():
            raise ConfigError(
                f"{name} in {option} is an option of pullfill: {option} takes vLLM flags only"
            )
    try:
        check(arguments)
    except ConfigError as exc:
        raise ConfigError(f"{option}: {exc}") from None
    if option.endswith(_ROLE_ARGS):
        for flag in (group[0] for group in group_flags(arguments)):
            if _of_server(flag):
                raise ConfigError(
                    f"{flag.partition('=')[0]} in {option} is a flag of frontends: give it to "
                    "`pullfill up` itself"
                )
    return arguments


# The files of vLLM that add flags to its parsers. A class of the second has a field for each flag
# of the API server. A test compares the names with those parsers
# (`tests/integration/test_vllm_names.py`).
_FILES = "engine/arg_utils.py", "entrypoints/*/cli_args.py", "utils/argparse_utils.py"
_ADDED = re.compile(r'add_argument\(\s*((?:"-[\w-]+",\s*)+)')
_CLASS = re.compile(r"^class \w*FrontendArgs\b.*?(?=^\S)", re.DOTALL | re.MULTILINE)
# Ours, or read before vLLM's other flags. Workers have them, too.
_OF_ALL = frozenset(("--config", "--host", "--port"))


@cache
def of_vllm() -> tuple[frozenset[str], frozenset[str]]:
    """Return vLLM's flags, and those of them that only its API server has. Without `--no-`, which
    turns off what can be turned off. Empty: vLLM is not installed."""
    # To ask its parsers would take seconds: vLLM must be imported.
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return frozenset(), frozenset()
    texts = [next(Path(vllm.origin).parent.glob(name)).read_text() for name in _FILES]
    engine, server, _ = ({f for flags in _ADDED.findall(t) for f in _quoted(flags)} for t in texts)
    for fields in _CLASS.findall(texts[1]):
        names = re.findall(r"^    ([a-z]\w*): ", fields, re.MULTILINE)
        server.update(f"--{name.replace('_', '-')}" for name in names)
    if "class EnableDisableAction" in texts[2]:  # since vLLM 0.33
        for flags in (engine, server):
            off = {flag.replace("--enable-", "--disable-") for flag in flags}
            flags |= off | {flag.replace("--disable-", "--enable-") for flag in flags}
    return frozenset(engine | server), frozenset(server - engine - _OF_ALL)


def _quoted(flags: str) -> list[str]:
    return [flag.replace("--no-", "--") for flag in re.findall(r'"([^"]+)"', flags)]


def _of_server(flag: str) -> bool:
    """Whether only vLLM's API server has the flag. Workers have no such server."""
    return f"--{flag_name(flag)}" in of_vllm()[1]
