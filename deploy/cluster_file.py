"""Reads the file of `pullfill up --file`: YAML whose keys are the flags of `up`, without `--`.

    model: /models/m
    decode: 2
    vllm-args: {max-model-len: 8192}
    set: {router.policy: cost}

The file has no options of its own: its values go through the command's parser, as texts, and count
where a flag is not given. A refusal is one line. It names the file, the line of the key and the
key.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
import yaml

from pullfill.deploy import vllm_flags
from pullfill.errors import ConfigError
from pullfill.registry import live_settings

# Keys that hold flags for vLLM: a text, a list, or a mapping of flags and values.
VLLM_KEYS = ("vllm-args", "decode-args", "prefill-args")
NOT_IN_FILES = frozenset({"file", "help"})


def read(path: str, context: click.Context) -> dict[str, Any]:
    """Return the values of the file, by name of the parameter of the command in `context`.

    Raises ConfigError."""
    params = {
        name: param
        for param in context.command.get_params(context)
        for name in (flag.removeprefix("--") for flag in param.opts if flag.startswith("--"))
        if name not in NOT_IN_FILES
    }
    values: dict[str, Any] = {}
    seen: dict[str, int] = {}
    for key, node in _pairs(path):
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"{path}, line {line}: {name} stands in line {seen[name]} already")
        seen[name] = line
        if (param := params.get(name)) is None:
            raise ConfigError(f"{path}, line {line}: {_unknown(name, params)}")
        try:
            value = _value(name, node)
            param.process_value(context, value)
        except (ConfigError, click.BadParameter, yaml.YAMLError, TypeError, ValueError) as exc:
            # The texts of click and yaml have a place of their own before the reason.
            why = getattr(exc, "message", None) or getattr(exc, "problem", None) or exc
            raise ConfigError(f"{path}, line {line}: {name}: {why}") from None
        values[str(param.name)] = value
    return values


def _pairs(path: str) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield the keys and values of the file, as nodes, which know their lines."""
    where, why = path, "nested too deep"
    try:
        root = yaml.compose(Path(path).read_bytes(), Loader=yaml.SafeLoader)
    except OSError as exc:
        raise ConfigError(f"cannot read {path} ({exc.strerror}): check --file") from None
    except yaml.MarkedYAMLError as exc:
        if mark := exc.problem_mark or exc.context_mark:
            where = f"{path}, line {mark.line + 1}"
        why = str(exc.problem or exc.context)
    except (yaml.YAMLError, RecursionError) as exc:
        why = " ".join(str(exc).split())  # of characters that are not allowed
    else:
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: give `KEY: VALUE` lines, e.g. `decode: 2`")
        yield from root.value if root is not None else ()
        return
    raise ConfigError(f"{where}: not YAML: {why}")


def _unknown(key: str, known: Mapping[str, click.Parameter]) -> str:
    near = get_close_matches(key.replace("_", "-"), sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "`pullfill up --help` lists them, without --"
    return f"there is no key {key!r}: {hint}"


def _value(key: str, node: yaml.Node) -> str | list[str]:
    """Return the value of a key as the command's parser takes it."""
    # YAML's own types do not matter: `namespace: off` is the word off.
    found = yaml.BaseLoader("").construct_document(node)
    if isinstance(found, dict) and len(found) < len(node.value):
        raise ConfigError("a key stands there twice")
    if key in VLLM_KEYS:
        return shlex.join(vllm_flags.of_role(key, _vllm(found, node)))
    if key != "set":
        return _text(found)
    if not isinstance(found, dict):
        raise ConfigError("give settings, e.g. `router.policy: cost`")
    settings = {name: _text(value) for name, value in found.items()}
    for name, text in settings.items():
        live_settings.check(name, text)
    return [f"{name}={text}" for name, text in settings.items()]


def _text(value: Any) -> str:
    """Return a value as it would stand on the command line: of a list, `A,B`."""
    return ",".join(_words(value if isinstance(value, list) else [value]))


def _words(values: list[Any]) -> list[str]:
    if not all(isinstance(word, str) for word in values):
        raise ConfigError("give one value, or a list of values")
    if not all(values):
        raise ConfigError("has no value: give one, or leave the key out")
    return values


def _vllm(found: Any, node: yaml.Node) -> str:
    """Return flags for vLLM as one text. In a mapping `a: 1` is `--a=1`, and `a: true` is `--a`."""
    if not isinstance(found, dict):
        return shlex.join(_words(found)) if isinstance(found, list) else _text(found)
    arguments: list[str] = []
    for name, value in found.items():
        flag = name if name.startswith("-") else f"--{name}"
        if isinstance(value, dict):  # vLLM reads it as JSON, where types matter
            typed = yaml.SafeLoader("").construct_document(node)[name]
            arguments.append(f"{flag}={json.dumps(typed, default=str)}")
        elif isinstance(value, list):
            arguments += [flag, *_words(value)]
        elif value in ("true", "false"):
            arguments.append(flag if value == "true" else f"--no-{flag.lstrip('-')}")
        else:
            arguments.append(f"{flag}={_text(value)}")
    return shlex.join(arguments)
