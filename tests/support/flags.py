"""Command lines in files of deploy/, read by the real parser."""

from __future__ import annotations

import re
from typing import Any

from pullfill.deploy import vllm_flags
from pullfill.deploy.cli import app

ENGINE_FLAGS = {"served-model-name", "enforce-eager", "kv-cache-memory-bytes", "max-model-len",
                "otlp-traces-endpoint"}  # fmt: skip
"""vLLM's, as far as they are used here: what our own command line does not know goes to vLLM."""


def split(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(values of our options, what goes to vLLM), by the real parser."""
    role = arguments[0]
    context = app.commands[role].make_context(role, arguments[1:])
    return dict(context.params), list(context.args)


def parse(arguments: list[str]) -> dict[str, Any]:
    """Values of our options. What goes to vLLM must be a flag of vLLM's, by its name:
    tests/integration/test_vllm_names.py asks vLLM's own parser."""
    role = arguments[0]
    params, rest = split(arguments)
    for group in vllm_flags.group_flags(rest):
        name = group[0].split("=")[0].removeprefix("--")
        known = ENGINE_FLAGS | (vllm_flags.FRONTEND_ONLY if role == "frontend" else set())
        assert name in known, f"{role} does not know --{name}"
    return params


def expand(text: str, values: dict[str, str], pattern: str) -> str:
    return re.sub(pattern, lambda found: values[found[1]], text)
