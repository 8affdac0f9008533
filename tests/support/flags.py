"""Command lines in files of deploy/, read by the real parser."""

from __future__ import annotations

import re
from typing import Any

from pullfill.deploy import vllm_flags
from pullfill.deploy.cli import app


def parse(arguments: list[str]) -> dict[str, Any]:
    """Values of our options. What goes to vLLM must be a flag that vLLM has for the role."""
    role, *given = arguments
    context = app.commands[role].make_context(role, given)
    vllm_flags.check(context.args)
    assert role == "frontend" or vllm_flags.for_worker(context.args) == context.args
    return context.params


def expand(text: str, values: dict[str, str], pattern: str) -> str:
    return re.sub(pattern, lambda found: values[found[1]], text)
