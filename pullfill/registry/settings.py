"""The hot router settings at `config/router`: watched by workers, written by the command line.

The key holds a JSON object with any of `RouterConfig`'s fields; what it leaves out, or the key
itself missing, means the default. Lifecycle: `start` → `current` changes by itself → `close`.
`set` and `get_all` need no `start`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from pullfill import log
from pullfill.errors import ConfigError, RegistryUnavailable
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Put, Synced, until_synced, watch_prefix
from pullfill.wire import RouterConfig, RouterPolicy

_log = log.get("registry.settings")
_ALLOWED = {
    "policy": "one of " + ", ".join(policy.value for policy in RouterPolicy),
    "max_local_prefill_length": "a whole number of tokens, 0 or more",
    "max_prefill_queue_size": "a whole number of jobs, 0 or more",
    "max_remote_kv_fraction": "more than 0 and at most 1",
    "remote_timeout_s": "seconds, more than 0 and at most 3600",
    "claim_timeout_s": "seconds, more than 0 and at most 3600",
}


def parse(value: bytes) -> RouterConfig:
    """Strictly read the stored form. Raises ConfigError naming the field."""
    try:
        return msgspec.json.decode(value, type=RouterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError(f"router settings: {exc}{_advice(str(exc))}") from exc


def _advice(text: str) -> str:
    """What the field that msgspec names (`$.field`) may be."""
    return next((f" (must be {a})" for f, a in _ALLOWED.items() if f"$.{f}" in text), "")


def field_name(key: str) -> str:
    """`policy` of `router.policy` or `policy`. Raises ConfigError for an unknown setting."""
    name = key.removeprefix("router.")
    if name not in RouterConfig.__struct_fields__:
        known = ", ".join(f"router.{field}" for field in RouterConfig.__struct_fields__)
        raise ConfigError(f"no setting {key!r}; there are: {known}")
    return name


class RouterSettings:
    """See the module."""

    def __init__(self, client: EtcdClient, namespace: str) -> None:
        self._client = client
        self._key = keys.router_config(namespace)
        self._current = RouterConfig()
        self._task: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()
        self._callbacks: list[Callable[[RouterConfig], None]] = []

    @property
    def current(self) -> RouterConfig:
        """The last good settings; defaults until there are any. No I/O."""
        return self._current

    def subscribe(self, callback: Callable[[RouterConfig], None]) -> None:
        """Call on the loop with the new settings at each change."""
        self._callbacks.append(callback)

    async def start(self, timeout_s: float = 30.0) -> None:
        """Begin to watch; returns when `current` is what etcd holds now.
        Raises RegistryUnavailable after `timeout_s`."""
        self._task = asyncio.create_task(self._follow(), name="router-settings")
        await until_synced(
            self._task, self._synced, timeout_s=timeout_s, what="the router settings"
        )

    async def close(self) -> None:
        """End the watch; `current` stays readable. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _follow(self) -> None:
        async for event in watch_prefix(self._client, self._key):
            if isinstance(event, Synced):
                self._synced.set()
            elif event.key != self._key.encode():
                continue  # another key that begins like ours
            elif isinstance(event, Put):
                try:
                    self._become(parse(event.value))
                except ConfigError as exc:
                    _log.error("refused, keeping the last good ones: %s", exc)
            else:
                self._become(RouterConfig())

    def _become(self, new: RouterConfig) -> None:
        if new == self._current:
            return
        self._current = new
        _log.info("router settings: %s", msgspec.json.encode(new).decode())
        for callback in self._callbacks:
            try:
                callback(new)
            except Exception:
                _log.exception("a subscriber failed")

    async def get_all(self) -> dict[str, Any]:
        """`router.FIELD` -> value as etcd holds it now. Raises ConfigError when that is bad."""
        kv = await self._client.get(self._key)
        config = parse(kv.value) if kv is not None else RouterConfig()
        return {f"router.{name}": value for name, value in msgspec.to_builtins(config).items()}

    async def set(self, key: str, text: str) -> RouterConfig:
        """Store one setting, leaving the others. Returns the new whole.

        Raises ConfigError with what is allowed; nothing is written then. Others may write at the
        same time: each keeps its field.
        """
        name = field_name(key)
        value = _from_text(name, text)
        for _ in range(10):
            kv = await self._client.get(self._key)
            fields = _good_fields(kv.value) if kv is not None else {}
            fields[name] = value
            new = parse(msgspec.json.encode(fields))
            revision = kv.mod_revision if kv is not None else 0
            if await self._client.put_if(
                self._key, msgspec.json.encode(fields), mod_revision=revision
            ):
                return new
        raise RegistryUnavailable(f"{self._key} keeps changing; try again")


def _from_text(name: str, text: str) -> Any:
    """`text` as the field's type. Raises ConfigError."""
    field = next(f for f in msgspec.structs.fields(RouterConfig) if f.name == name)
    try:
        value = msgspec.convert(text.strip(), type=field.type, strict=False)
    except msgspec.MsgspecError as exc:
        raise ConfigError(
            f"router.{name}: {text!r} is not allowed: must be {_ALLOWED[name]}"
        ) from exc
    return msgspec.to_builtins(value)


def _good_fields(value: bytes) -> dict[str, Any]:
    """What is valid in a stored object, so that setting one field repairs a bad key."""
    try:
        stored = msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    good = {}
    for name, item in stored.items():
        try:
            parse(msgspec.json.encode({name: item}))
        except ConfigError:
            continue
        good[name] = item
    return good
