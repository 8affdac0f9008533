"""Reads the file of `pullfill up --file`: YAML whose keys are the flags of `up`, without `--`.

    model: /models/m
    decode: 2
    vllm-args: {max-model-len: 8192}
    set: {router.policy: conditional}

The file has no options of its own: it stands for a command line, which the command's parser reads.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pullfill.errors import ConfigError

# Keys that hold flags for vLLM: a text, a list, or a mapping of flags and values.
VLLM_KEYS = ("vllm-args", "decode-args", "prefill-args")


def arguments(path: str) -> list[str]:
    """Return the command line that the file stands for. Raises ConfigError."""
    try:
        text = Path(path).read_bytes()
        # Values go to a parser of texts. YAML's types only tell flags without a value, and JSON.
        words, typed = yaml.load(text, yaml.BaseLoader), yaml.safe_load(text)
        if not isinstance(words, dict):
            raise ConfigError(f"{path}: give `KEY: VALUE` lines, e.g. `decode: 2`")
        values = zip(words.items(), typed.values(), strict=False)
        return [part for (key, value), kind in values for part in _flags(key, value, kind)]
    except OSError as exc:
        raise ConfigError(f"cannot read {path} ({exc.strerror}): check --file") from None
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        why = " ".join(str(getattr(exc, "problem", None) or exc).split())
        raise ConfigError(f"{where}: not YAML: {why}") from None


def _flags(key: str, value: Any, typed: Any) -> Iterator[str]:
    if key == "set" and isinstance(value, dict):
        yield from (f"--set={name}={text}" for name, text in value.items())
    elif key in VLLM_KEYS and isinstance(value, dict):
        pairs = zip(value.items(), typed.values(), strict=False)
        flags = [part for (name, one), kind in pairs for part in _of_vllm(name, one, kind)]
        yield f"--{key}={shlex.join(flags)}"
    elif isinstance(value, list):
        words = map(str, value)
        yield f"--{key}={shlex.join(words) if key in VLLM_KEYS else ','.join(words)}"
    else:
        yield from _of_vllm(key, value, typed)


def _of_vllm(name: str, value: Any, typed: Any) -> Iterator[str]:
    flag = name if name.startswith("-") else f"--{name}"
    if isinstance(typed, bool):
        yield flag if typed else f"--no-{flag.lstrip('-')}"
    elif isinstance(value, list):
        yield from (flag, *map(str, value))
    else:
        yield f"{flag}={json.dumps(typed, default=str) if isinstance(value, dict) else value}"
