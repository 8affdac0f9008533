"""Reads the user's vLLM flags, and checks them before anything starts. A refusal is one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from pullfill.config import NO_DATA_PARALLEL
from pullfill.deploy import known_flags
from pullfill.errors import ConfigError
from pullfill.options import ClusterOptions, FrontendOptions, UpOptions, WorkerOptions, declared

_DATA_PARALLEL = re.compile(r"data-parallel\b|dp[a-z]?\Z|dp-supervisor\b")
_SIZE = ("data-parallel-size", "dp")
_FEW = 4
_OF_UP = frozenset(
    ("--file", "--detach", "--vllm-args", "--decode-args", "--prefill-args", "--set")
)
"""Flags that are no fields of an options class."""

FRONTEND_ONLY = frozenset(
    """
    allow-credentials allowed-headers allowed-methods allowed-origins
    anthropic-disabled-thinking-effort api-key chat-template chat-template-content-format
    cohere-format cohere-is-reasoning-model default-chat-template-kwargs
    disable-access-log-for-endpoints disable-fastapi-docs disable-uvicorn-access-log
    enable-auto-tool-choice enable-flash-late-interaction enable-force-include-usage
    enable-log-deltas enable-log-outputs enable-log-requests enable-offline-docs
    enable-per-request-metrics enable-prompt-tokens-details enable-request-id-headers
    enable-scale-out enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
    exclude-tools-when-tool-choice-none
    fingerprint-mode fingerprint-value h11-max-header-count h11-max-incomplete-event-size
    log-error-stack lora-modules max-log-len middleware response-role return-tokens-as-token-ids
    root-path sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers
    ssl-keyfile tokens-only tool-call-parser tool-parser-plugin tool-server tool-strict-level
    trust-request-chat-template trust-request-mm-kwargs uvicorn-log-level
    """.split()
)
"""Flags of vLLM's API server. Workers do not have one.

A test compares them with vLLM's parsers (`tests/integration/test_vllm_names.py`)."""
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
"""Flags of vLLM's API server that our frontend has no use for, and what to know instead."""
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
    """Return the plain name of a flag: `--no-a_b=1` -> `a-b`."""
    return flag.split("=", 1)[0].lstrip("-").replace("_", "-").removeprefix("no-")


def for_worker(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those that only an API server understands."""
    kept = (g for g in group_flags(arguments) if flag_name(g[0]) not in FRONTEND_ONLY)
    return [part for group in kept for part in group]


def for_frontend(arguments: Sequence[str]) -> list[str]:
    """Return those flags of decode workers that a frontend must know: how they speculate.

    Without them vLLM's frontend has no metrics of drafts and checks no request against them."""
    kept = (
        # Also --speculative-config.method and the like.
        g
        for g in group_flags(arguments)
        if flag_name(g[0]).partition(".")[0] in _SPECULATION
    )
    return [part for group in kept for part in group]


def check(arguments: Sequence[str]) -> list[str]:
    """Refuse stray words, flags that vLLM does not have, that pullfill sets itself, and flags that
    workers or frontends do not support.

    vLLM also takes the beginning of a flag's name. Returns the arguments with such names written
    out, so nobody else has to know. Raises ConfigError."""
    try:
        groups = group_flags(arguments)
    except ValueError as exc:
        raise ConfigError(
            f"unexpected argument {exc.args[0]!r}: vLLM flags are given as --flag value"
        ) from None
    checked: list[str] = []
    for flag, *values in groups:
        given, equals, joined = flag.partition("=")
        whole = _whole_name(given)
        name = flag_name(whole)
        checked += [f"{whole}{equals}{joined}", *values]
        if name == "kv-transfer-config" and "OffloadingConnector" not in " ".join([flag, *values]):
            raise ConfigError(
                f"{given} is pullfill's own to set: remove it, or name vLLM's OffloadingConnector"
            )
        if name in _NOT_SERVED and not given.startswith("--no-"):
            raise ConfigError(f"{given}: not supported by pullfill's frontend: {_NOT_SERVED[name]}")
        alone = name in _SIZE and [joined or "", *values][-1] == "1"
        if _DATA_PARALLEL.match(name) and not alone:
            raise ConfigError(f"{given}: {NO_DATA_PARALLEL}")
    return checked


def of_pullfill() -> set[str]:
    """Return the flags of pullfill's commands that also take vLLM's."""
    kinds = (UpOptions, WorkerOptions, FrontendOptions, ClusterOptions)
    return {one.name.partition("/")[0] for kind in kinds for one in declared(kind)} | _OF_UP


def _whole_name(flag: str) -> str:
    """Return a flag with its name written out: `--no-enable-pref` -> `--no-enable-prefix-caching`.

    vLLM also takes `--config.key`, where `config` may be a beginning. A flag that vLLM does not
    have is refused. So is a beginning that fits several flags, or one of pullfill."""
    name = flag_name(flag).partition(".")[0]
    ours, vllms = of_pullfill(), {f"--{known}" for known in known_flags.LONG}
    begun = sorted(one for one in ours if one.startswith(f"--{name}"))
    if flag.startswith("--"):
        short_for = sorted(known for known in vllms if known.startswith(f"--{name}"))
        if f"--{name}" in vllms:
            return flag
        if len(short_for) == 1 and not begun:
            negated = "--no-" if flag.startswith(("--no-", "--no_")) else "--"
            _, dot, key = flag.partition(".")
            return f"{negated}{short_for[0].removeprefix('--')}{dot}{key}"
        if short_for:
            several = ", ".join(dict.fromkeys([*begun, *short_for][:_FEW]))
            raise ConfigError(f"{flag} may be short for {several}: write out the one you mean")
    elif name in known_flags.SHORT or name.startswith("O"):
        return flag
    near = begun or get_close_matches(flag.replace("_", "-"), sorted(vllms | ours), n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists those of pullfill"
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


def of_role(option: str, text: str | None, own: Collection[str]) -> list[str]:
    """Return the vLLM flags in the value of `--decode-args` or `--prefill-args`.

    own: options of pullfill itself. They are refused here, and in the flags of one role those of
    vLLM's API server, which workers do not have. Raises ConfigError, one line.
    """
    try:
        arguments = shlex.split(text or "")
    except ValueError as exc:
        raise ConfigError(f"{option} {text!r} cannot be read ({exc}): check its quotes") from None
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name in own:
            raise ConfigError(
                f"{name} in {option} is an option of pullfill: {option} takes vLLM flags only"
            )
    try:
        checked = check(arguments)
    except ConfigError as exc:
        raise ConfigError(f"{option}: {exc}") from None
    if option.endswith(_ROLE_ARGS):
        for flag in (group[0] for group in group_flags(checked)):
            if flag_name(flag) in FRONTEND_ONLY:
                raise ConfigError(
                    f"{flag.partition('=')[0]} in {option} is a flag of frontends: give it to "
                    "`pullfill up` itself"
                )
    return checked
