"""The file of `--servers-file`: stock servers as a YAML or JSON list, watched.

    - {role: prefill, url: "http://10.0.0.1:8100", kv: "10.0.0.1:8998"}
    - {role: decode, url: "http://10.0.0.2:8200"}

Keys: `role`, `url`, and `kv` if the connector needs a KV address.

A task on the frontend's loop watches it. The file is read and parsed in a thread, so a slow disk
stops no request.

A file that is broken or gone changes nothing: the last good servers stay. `trouble` says why in one
line that names the file, the line and the key. At the start there are no last good servers, so the
frontend does not start. An empty file counts as broken, because many editors and `cp` empty a file
before they write it. `[]` means no servers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

import yaml

from pullfill.errors import ConfigError, NotNow
from pullfill.frontend.forward.entries import Entry, kv_of, role_of, url_of
from pullfill.runtime import log
from pullfill.runtime.watched_files import WatchedFiles

_log = log.get("frontend.forward")

MAX_BYTES = 128 << 10
MAX_SERVERS = 512
_CHECKS: dict[str, Callable[[str], str]] = {"role": role_of, "url": url_of, "kv": kv_of}
_FORM = "give a list of servers, e.g. `- {role: decode, url: http://10.0.0.2:8200}`"


class ServerFile:
    """The watched file. `run` it as a task.

    publish: gets the servers of the file, at the start and after each change.
    trouble: why the file cannot be used now. Empty: it is used.

    Raises ConfigError if the file cannot be used at the start."""

    def __init__(self, path: str, publish: Callable[[tuple[Entry, ...]], None]) -> None:
        self._path = path
        self._publish = publish
        self._watched = WatchedFiles(path)
        self.trouble = ""
        publish(read(path))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._watched.wait()
            await self._read()

    async def look(self) -> None:
        """Look once, and publish what the file says if it is new."""
        if await self._watched.changed():
            await self._read()

    async def _read(self) -> None:
        try:
            found = await asyncio.to_thread(read, self._path)
        except ConfigError as exc:
            self.trouble = f"{exc}; the last good servers stay"
            _log.warning("%s", self.trouble)
        else:
            self.trouble = ""
            _log.info("%s names %d stock servers", self._path, len(found))
            self._publish(found)


def read(path: str) -> tuple[Entry, ...]:
    """Return the servers of a file. Raises ConfigError."""
    try:
        # Not a pipe or a device: opening or reading one might never end.
        if os.path.exists(path) and not os.path.isfile(path):
            raise ConfigError(f"{path} is no file: give a YAML or JSON file of servers")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise NotNow(f"cannot read {path} ({exc.strerror}): check --servers-file") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes: name fewer servers")
    try:
        return parse(data.decode(), path)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: give a YAML or JSON file") from None


def parse(text: str, name: str) -> tuple[Entry, ...]:
    """Return the servers of a file's text. name: of the file. Raises ConfigError."""
    if text.lstrip().startswith("["):
        text = text.replace("\t", " ")  # JSON may have tabs, YAML may not
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{name}, line {mark.line + 1 if mark else 1}"
        raise ConfigError(f"{where}: {exc.problem or 'is not YAML'}: {_FORM}") from None
    except (yaml.YAMLError, RecursionError) as exc:
        why = (str(exc) or type(exc).__name__).splitlines()[0]
        raise ConfigError(f"{name} is not YAML: {why}") from None
    if root is None:
        raise ConfigError(f"{name}, line 1: the file is empty: give [] if there are no servers")
    if not isinstance(root, yaml.SequenceNode):
        raise ConfigError(f"{_at(name, root)}: {_FORM}")
    if len(root.value) > MAX_SERVERS:
        raise ConfigError(f"{_at(name, root)}: {MAX_SERVERS} servers at most")
    found: dict[tuple[str, str], tuple[Entry, int]] = {}
    for node in root.value:
        entry, line = _entry(name, node), node.start_mark.line + 1
        other, first = found.setdefault((entry.role, entry.url), (entry, line))
        if other is not entry:
            what = "" if other == entry else " with another kv"
            raise ConfigError(
                f"{_at(name, node)}: url: {entry.url} stands in line {first} already{what}"
            )
    return tuple(entry for entry, _ in found.values())


def _entry(name: str, node: yaml.Node) -> Entry:
    values = dict(_pairs(name, node))
    for key in ("role", "url"):
        if key not in values:
            raise ConfigError(f"{_at(name, node)}: {key}: the server has none")
    return Entry(values["role"], values["url"], values.get("kv", ""))


def _pairs(name: str, node: yaml.Node) -> Iterator[tuple[str, str]]:
    """Yield the checked keys and values of one server. Raises ConfigError."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_at(name, node)}: {_FORM}")
    seen = set()
    for key, value in node.value:
        word = key.value if isinstance(key, yaml.ScalarNode) else "?"
        where = f"{_at(name, key)}: {word[:40]}"
        if word not in _CHECKS:
            raise ConfigError(f"{where}: no key is called so: use {', '.join(_CHECKS)}")
        if word in seen:
            raise ConfigError(f"{where}: stands here twice")
        seen.add(word)
        if not isinstance(value, yaml.ScalarNode) or not (value.value or word == "kv"):
            raise ConfigError(f"{where}: give one value")
        try:
            yield word, _CHECKS[word](value.value)
        except ConfigError as exc:
            raise ConfigError(f"{where}: {exc}") from None


def _at(name: str, node: yaml.Node) -> str:
    return f"{name}, line {node.start_mark.line + 1}"
