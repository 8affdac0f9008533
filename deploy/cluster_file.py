"""Reads the file of `pullfill up --file`: YAML whose keys are the flags of `up`, without `--`.

    model: /models/m
    decode: 2
    vllm-args: {max-model-len: 8192}
    set: {router.policy: cost}

The file has no options of its own: its values go through the command's parser, as texts, and count
where a flag is not given. A refusal is one line. It names the file, the line and the key.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any

import click
import yaml

from pullfill.deploy import vllm_flags
from pullfill.errors import ConfigError
from pullfill.registry import live_settings

VLLM_KEYS = ("vllm-args", "decode-args", "prefill-args")
"""Keys that hold flags for vLLM: a text, a list, or a mapping of flags and values."""
SET = "set"
NOT_IN_FILES = frozenset({"file", "help"})
_KEY = re.compile(r"\s*([\w.-]+)\s*:(?:\s|$)")


def read(path: str, context: click.Context) -> dict[str, Any]:
    """Return the values of the file, by name of the parameter of the command in `context`.

    Raises ConfigError."""
    root = _parsed(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{_where(path, root)}: give `KEY: VALUE` lines, e.g. `decode: 2`")
    params = {
        name: param
        for param in context.command.get_params(context)
        for name in (flag.removeprefix("--") for flag in param.opts if flag.startswith("--"))
        if name not in NOT_IN_FILES
    }
    values: dict[str, Any] = {}
    for key, node in _pairs(path, root):
        param, where = params.get(key), f"{_where(path, node)}: {key}"
        if param is None:
            raise ConfigError(_unknown(_where(path, node), key, params))
        if key in VLLM_KEYS:
            value: Any = shlex.join(_vllm(path, key, node))
        elif key == SET:
            value = _settings(path, node)
        else:
            value = _text(where, node)
        try:
            param.process_value(context, value)
        except click.BadParameter as exc:
            raise ConfigError(f"{where}: {exc.message}") from None
        except ConfigError as exc:  # of the flag's `parse`
            raise ConfigError(f"{where}: {exc}") from None
        values[str(param.name)] = value
    return values


def _where(path: str, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _unknown(where: str, key: str, known: Collection[str]) -> str:
    near = get_close_matches(key.replace("_", "-"), sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "`pullfill up --help` lists them, without --"
    return f"{where}: there is no key {key!r}: {hint}"


def _parsed(path: str) -> yaml.Node | None:
    """Return the nodes of the file, which know their lines. None: it is empty."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            text = file.read()
    except OSError as exc:
        raise ConfigError(f"cannot read {path} ({exc.strerror}): check --file") from None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as exc:
        line = begin = text.count("\n", 0, exc.position)
        why = f"the character {chr(exc.character)!r} is not allowed: give UTF-8 text"
    except yaml.MarkedYAMLError as exc:
        marks = [mark for mark in (exc.problem_mark, exc.context_mark) if mark]
        line, begin = marks[0].line, min(mark.line for mark in marks)
        why = str(exc.problem or exc.context)
    except RecursionError:
        line, begin, why = 0, -1, "nested too deep"
    # The key that the broken part belongs to stands in this line or above.
    above = (_KEY.match(each) for each in reversed(text.splitlines()[: begin + 1]))
    key = next((f"{found[1]}: " for found in above if found), "")
    raise ConfigError(f"{path}, line {line + 1}: {key}not YAML: {why}")


def _pairs(path: str, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    """Yield keys and values. Raises ConfigError for a key that is no word or comes twice."""
    seen: dict[str, int] = {}
    for key, value in node.value:
        where = _where(path, key)
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be a word, e.g. `decode: 2`")
        if key.value in seen:
            raise ConfigError(f"{where}: {key.value} stands in line {seen[key.value]} already")
        seen[key.value] = key.start_mark.line + 1
        yield key.value, value


def _text(where: str, node: yaml.Node) -> str:
    """Return a value as it would stand on the command line: of a list, `A,B`."""
    if isinstance(node, yaml.SequenceNode):
        return ",".join(_word(where, item) for item in node.value)
    return _word(where, node)


def _word(where: str, node: yaml.Node) -> str:
    """Return a value that is neither a list nor a mapping."""
    # YAML's own types do not matter: `namespace: off` is the word off.
    if not isinstance(node, yaml.ScalarNode):
        kind = "list in a list" if isinstance(node, yaml.SequenceNode) else "mapping"
        raise ConfigError(f"{where}: give one value, not a {kind}")
    if node.tag == "tag:yaml.org,2002:null" and not node.style:
        raise ConfigError(f"{where}: has no value: give one, or leave the key out")
    return str(node.value)


def _settings(path: str, node: yaml.Node) -> list[str]:
    """Return `KEY=VALUE` for each setting."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_where(path, node)}: {SET}: give settings, e.g. `router.policy: cost`")
    found = []
    for key, value in _pairs(path, node):
        where = _where(path, value)
        text = _text(f"{where}: {SET}: {key}", value)
        try:
            live_settings.check(key, text)
        except ConfigError as exc:
            raise ConfigError(f"{where}: {SET}: {exc}") from None
        found.append(f"{key}={text}")
    return found


# --------------------------------------------------------------------------- flags of vLLM


def _vllm(path: str, key: str, node: yaml.Node) -> list[str]:
    """Return vLLM flags. Each is checked with its line."""

    def checked(at: yaml.Node, text: str) -> list[str]:
        try:
            return vllm_flags.of_role(key, text)
        except ConfigError as exc:
            raise ConfigError(f"{_where(path, at)}: {exc}") from None

    if isinstance(node, yaml.MappingNode):
        arguments: list[str] = []
        for flag, value in _pairs(path, node):
            words = _flag(f"{_where(path, value)}: {key}: {flag}", flag, value)
            arguments += checked(value, shlex.join(words))
        return arguments
    where = f"{_where(path, node)}: {key}"
    if isinstance(node, yaml.SequenceNode):
        return checked(node, shlex.join(_word(where, item) for item in node.value))
    return checked(node, _text(where, node))


def _flag(where: str, name: str, node: yaml.Node) -> list[str]:
    """Return one vLLM flag with its value: `a: 1` is `--a=1`, `a: true` is `--a`."""
    flag = name if name.startswith("-") else f"--{name}"
    if isinstance(node, yaml.MappingNode):
        try:
            value = yaml.SafeLoader("").construct_document(node)
            return [f"{flag}={json.dumps(value, default=str)}"]
        except (yaml.MarkedYAMLError, TypeError, ValueError) as exc:
            why = exc.problem if isinstance(exc, yaml.MarkedYAMLError) else exc
            raise ConfigError(f"{where}: {why}") from None
    if isinstance(node, yaml.SequenceNode):
        return [flag, *(_word(where, item) for item in node.value)]
    text = _text(where, node)
    plain = isinstance(node, yaml.ScalarNode) and not node.style  # "true" in quotes is a text
    if plain and text in ("true", "false"):
        return [flag if text == "true" else f"--no-{flag.lstrip('-')}"]
    return [f"{flag}={text}"]
