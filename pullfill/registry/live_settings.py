"""The settings at `config/router` and `config/queue`. `pullfill config` writes, others watch them.

Each key holds a JSON object with any of the fields of `RouterConfig` or `QueueSettings`. A missing
field, or a missing key, means the default. A field that this build does not know is ignored, with a
warning: another build may have written it. `pullfill config` refuses it.

Life: `start` → `current` changes by itself → `close`.
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


def _allowed(field_type: Any) -> str:
    """Say what a setting may be, by the type of its field. Its name says what a number counts."""
    info = inspect.type_info(field_type)
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


async def read_all(client: EtcdClient, namespace: str) -> dict[str, Any]:
    """Return `ROOT.FIELD` -> value, as in etcd now. Raises ConfigError on bad values there."""
    found: dict[str, Any] = {}
    for kind, root in _ROOT.items():
        kv = await client.get(keys.record(namespace, "config", root))
        config = kind() if kv is None else parse(kv.value, kind)
        found |= {f"{root}.{name}": one for name, one in msgspec.to_builtins(config).items()}
    return found


async def store(client: EtcdClient, namespace: str, key: str, text: str) -> Any:
    """Store one setting, e.g. `router.policy`, or remove it if `text` is `UNSET`. Return its value.

    Other settings are not changed, also if others write them at the same time. Raises ConfigError
    for an unknown setting, and for a bad value, with those that are allowed. Then nothing is
    written. It also raises that if another setting is bad: then this one is written, but no process
    takes any."""
    kind, name = find(key)
    value = None if text == UNSET else _from_text(kind, name, text)
    where = keys.record(namespace, "config", _ROOT[kind])
    for _ in range(10):
        kv = await client.get(where)
        fields = stored(kv.value) if kv is not None else {}
        fields.pop(name, None)
        if value is not None:
            fields[name] = value
        new = msgspec.json.encode(fields)
        if await client.put_if(where, new, mod_revision=kv.mod_revision if kv else 0):
            try:
                parse(new, kind)
            except ConfigError as exc:
                raise ConfigError(
                    f"{key} is stored, but no process takes it before another setting is mended: "
                    f"{exc}"
                ) from None
            return getattr(kind(), name) if value is None else value
    raise RegistryUnavailable(f"{where} keeps changing; try again")


class Settings(Follower, Generic[T]):
    """See the module. Subscribers get the new settings.

    kind: RouterConfig or QueueSettings.
    current: the last good settings. Defaults until there are any."""

    def __init__(self, client: EtcdClient, namespace: str, kind: type[T]) -> None:
        self._kind = kind
        self._root = _ROOT[kind]
        self._key = keys.record(namespace, "config", self._root)
        super().__init__(client, self._key, f"the {self._root} settings")
        self.current: T = kind()

    def _on_change(self, event: Put | Delete) -> None:
        if event.key != self._key.encode():
            return  # another key that begins like ours
        try:
            new = parse(event.value, self._kind) if isinstance(event, Put) else self._kind()
        except ConfigError as exc:
            _log.error("settings in etcd refused, keeping the last good ones: %s", exc)
            return
        known = self._kind.__struct_fields__
        if isinstance(event, Put) and (strange := stored(event.value).keys() - set(known)):
            _log.warning("unknown %s settings in etcd: %s", self._root, ", ".join(sorted(strange)))
        if new != self.current:
            self.current = new
            _log.info("%s settings: %s", self._root, msgspec.json.encode(new).decode())
            self._tell(new)


def _from_text(kind: type[T], name: str, text: str) -> Any:
    """`text` as the field's type. Raises ConfigError."""
    field = next(f for f in msgspec.structs.fields(kind) if f.name == name)
    value: Any = None
    with suppress(msgspec.MsgspecError):
        value = msgspec.convert(text.strip(), type=field.type, strict=False)
    if value is None:
        raise ConfigError(
            f"{_ROOT[kind]}.{name}: {text!r} is not allowed: must be {_allowed(field.type)}, "
            f"or {UNSET} for the default"
        )
    return msgspec.to_builtins(value)


def stored(value: bytes) -> dict[str, Any]:
    """The fields of a stored object, also bad ones, and those of another build. Empty: it is no
    object, so the next `store` replaces it."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(value, type=dict[str, Any])
    return {}
