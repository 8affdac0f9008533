"""Command lines in files of deploy/, read by the real parser."""

from __future__ import annotations

import re
from typing import Any

from pullfill.deploy import vllm_flags
from pullfill.deploy.cli import app


def split(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(values of our options, what goes to vLLM), by the real parser."""
    role = arguments[0]
    context = app.commands[role].make_context(role, arguments[1:])
    return dict(context.params), list(context.args)


def parse(arguments: list[str]) -> dict[str, Any]:
    """Values of our options. What goes to vLLM must be a flag that vLLM has for the role."""
    params, rest = split(arguments)
    vllm_flags.check(rest)
    assert arguments[0] == "frontend" or vllm_flags.for_worker(rest) == rest
    return params


def expand(text: str, values: dict[str, str], pattern: str) -> str:
    return re.sub(pattern, lambda found: values[found[1]], text)
