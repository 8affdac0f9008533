"""The settings at `config/router` and `config/queue`. `pullfill config` writes, others watch them.

Each key holds a JSON object with any of the fields of `RouterConfig` or `QueueSettings`. A missing
field, or a missing key, means the default. A field that this build does not know is ignored, with a
warning: another build may have written it. `pullfill config` refuses it.

Life: `start` → `current` changes by itself → `close`. `set` and `get_all` need no `start`.
"""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from pullfill.errors import ConfigError, RegistryUnavailable
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.wire import Message, QueueSettings, RouterConfig

T = TypeVar("T", bound=Message)

_log = log.get("registry.settings")
# A value that sets a setting back to its default.
UNSET = "unset"
_ROOT: dict[type[Message], str] = {RouterConfig: "router", QueueSettings: "queue"}


def parse(value: bytes, kind: type[T]) -> T:
    """Read the stored form. Raises ConfigError naming the field."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{_ROOT[kind]} settings: {exc}") from exc


def _allowed(kind: type[Message], name: str) -> str:
    """Say what a setting may be, by the type of its field. Its name says what a number counts."""
    struct = inspect.type_info(kind)
    assert isinstance(struct, inspect.StructType)
    info = next(f.type for f in struct.fields if f.name == name)
    if isinstance(info, inspect.UnionType):  # with None, for "not set"
        info = next(t for t in info.types if not isinstance(t, inspect.NoneType))
    if isinstance(info, inspect.EnumType):
        return "one of " + ", ".join(value.value for value in info.cls)
    if not isinstance(info, inspect.IntType | inspect.FloatType):
        return "true or false"
    number = "a whole number" if isinstance(info, inspect.IntType) else "a number"
    bounds = {"at least": info.ge, "more than": info.gt, "at most": info.le}
    told = [f"{words} {bound:.10g}" for words, bound in bounds.items() if bound is not None]
    return f"{number}, {' and '.join(told)}"


def find(key: str) -> tuple[type[Message], str]:
    """Return (RouterConfig, "policy") for `router.policy`.

    Raises ConfigError for an unknown setting."""
    for kind, root in _ROOT.items():
        name = key.removeprefix(f"{root}.")
        if name in kind.__struct_fields__ and name != key:
            return kind, name
    known = [f"{root}.{f}" for kind, root in _ROOT.items() for f in kind.__struct_fields__]
    near = get_close_matches(key, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError(f"no setting {key!r}{hint}; there are: {', '.join(known)}")


def check(key: str, text: str) -> None:
    """Raise ConfigError if there is no such setting, or if the text is no value for it."""
    kind, name = find(key)
    if text != UNSET:
        _from_text(kind, name, text)


async def store(client: EtcdClient, namespace: str, key: str, text: str) -> Any:
    """Store one setting, e.g. `router.policy`. Return its new value.

    Raises ConfigError for an unknown setting or a bad value."""
    kind, name = find(key)
    return await Settings(client, namespace, kind).set(name, text)


class Settings(Follower, Generic[T]):
    """See the module. Subscribers get the new settings.

    kind: RouterConfig or QueueSettings.
    current: the last good settings. Defaults until there are any."""

    def __init__(self, client: EtcdClient, namespace: str, kind: type[T]) -> None:
        self._kind = kind
        self._root = _ROOT[kind]
        self._key = keys.record(namespace, "config", self._root)
        super().__init__(client, self._key, f"the {self._root} settings", self._on_change)
        self.current: T = kind()

    def _on_change(self, event: Put | Delete) -> None:
        if event.key != self._key.encode():
            return  # another key that begins like ours
        try:
            new = parse(event.value, self._kind) if isinstance(event, Put) else self._kind()
        except ConfigError as exc:
            _log.error("settings in etcd refused, keeping the last good ones: %s", exc)
            return
        if isinstance(event, Put) and (strange := _unknown(event.value, self._kind)):
            _log.warning("unknown %s settings in etcd: %s", self._root, ", ".join(strange))
        if new != self.current:
            self.current = new
            _log.info("%s settings: %s", self._root, msgspec.json.encode(new).decode())
            self._tell(new)

    async def get_all(self) -> dict[str, Any]:
        """Return `ROOT.FIELD` -> value, as in etcd now. Raises ConfigError on bad values there."""
        kv = await self._client.get(self._key)
        config = self._kind() if kv is None else parse(kv.value, self._kind)
        return {
            f"{self._root}.{name}": value for name, value in msgspec.to_builtins(config).items()
        }

    async def set(self, name: str, text: str) -> Any:
        """Store one field, or remove it if `text` is `UNSET`. Returns its value.

        Other fields are not changed, also if others write them at the same time. Raises ConfigError
        for a bad value, and says which are allowed. Then nothing is written. It also raises that if
        another field is bad: then this one is written, but no process takes any.
        """
        value = None if text == UNSET else _from_text(self._kind, name, text)
        for _ in range(10):
            kv = await self._client.get(self._key)
            fields = stored(kv.value) if kv is not None else {}
            fields.pop(name, None)
            if value is not None:
                fields[name] = value
            revision = kv.mod_revision if kv is not None else 0
            new = msgspec.json.encode(fields)
            if await self._client.put_if(self._key, new, mod_revision=revision):
                try:
                    parse(new, self._kind)
                except ConfigError as exc:
                    raise ConfigError(
                        f"{self._root}.{name} is stored, but no process takes it before another "
                        f"setting is mended: {exc}"
                    ) from None
                return getattr(self._kind(), name) if value is None else value
        raise RegistryUnavailable(f"{self._key} keeps changing; try again")


def _from_text(kind: type[T], name: str, text: str) -> Any:
    """`text` as the field's type. Raises ConfigError."""
    field = next(f for f in msgspec.structs.fields(kind) if f.name == name)
    value: Any = None
    try:
        value = msgspec.convert(text.strip(), type=field.type, strict=False)
    except msgspec.MsgspecError:
        pass
    if value is None:
        raise ConfigError(
            f"{_ROOT[kind]}.{name}: {text!r} is not allowed: must be {_allowed(kind, name)}, "
            f"or {UNSET} for the default"
        )
    return msgspec.to_builtins(value)


def _unknown(value: bytes, kind: type[Message]) -> list[str]:
    """The fields of a stored object that this build does not know."""
    return sorted(msgspec.json.decode(value).keys() - set(kind.__struct_fields__))


def stored(value: bytes) -> dict[str, Any]:
    """The fields of a stored object, also bad ones, and those of another build. Empty: it is no
    object, so the next `set` replaces it."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(value, type=dict[str, Any])
    return {}
