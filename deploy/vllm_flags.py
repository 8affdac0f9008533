"""Checks the user's vLLM flags before anything starts. Each refusal is one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

from pullfill.config import NO_DATA_PARALLEL, NO_KV_OFFLOADING
from pullfill.deploy.defaults import flag_name, group_flags
from pullfill.errors import ConfigError

_DATA_PARALLEL = re.compile(r"data-parallel\b|dp[a-z]?\Z")
_SIZE = ("data-parallel-size", "dp")


def check(arguments: Sequence[str]) -> None:
    """Refuse stray words, flags that pullfill sets itself, and flags that workers do not support.

    Raises ConfigError."""
    try:
        groups = group_flags(arguments)
    except ValueError as exc:
        raise ConfigError(
            f"unexpected argument {exc.args[0]!r}: vLLM flags are given as --flag value"
        ) from None
    for flag, *values in groups:
        given, _, joined = flag.partition("=")
        name = flag_name(flag)
        if name == "kv-transfer-config":
            raise ConfigError(f"{given} is pullfill's own to set: remove it")
        if name.startswith("kv-offloading"):
            raise ConfigError(f"{given}: {NO_KV_OFFLOADING}")
        alone = name in _SIZE and [joined or "", *values][-1] == "1"
        if _DATA_PARALLEL.match(name) and not alone:
            raise ConfigError(f"{given}: {NO_DATA_PARALLEL}")


def check_plain_http(arguments: Sequence[str]) -> None:
    """Refuse TLS flags for `up`: it does not know which certificate to trust, so it could not ask a
    frontend whether it is ready. Raises ConfigError."""
    for flag in (argument.split("=", 1)[0].replace("_", "-") for argument in arguments):
        if flag.startswith("--ssl-"):
            raise ConfigError(
                f"{flag}: the frontends of `up` speak plain HTTP. Start the rest with `pullfill up "
                f"--frontends 0`, then `pullfill frontend {flag} ...` by hand"
            )


def of_role(option: str, text: str | None, own: Collection[str]) -> list[str]:
    """Return the vLLM flags in the value of `--decode-args` or `--prefill-args`.

    own: options of pullfill itself. They are refused here. Raises ConfigError, one line.
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
        check(arguments)
    except ConfigError as exc:
        raise ConfigError(f"{option}: {exc}") from None
    return arguments
