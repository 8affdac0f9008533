"""LoRA adapters as a frontend knows them: by name, with the digest of their files.

All frontends of a cluster serve the same adapters, which are in etcd. An adapter is loaded in three
steps: every decode worker loads the files at its path and returns their digest; the adapter is
written to etcd; every decode worker is told that this is the newest load of the name.

Requests go to workers with the identity of their adapter (engine/adapters.py). vLLM's frontend and
users see the name.

Adapters of `--lora-modules` are loaded before there is a worker. Their files are read when the
first worker is ready, or the first request needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import HTTPException
from vllm.lora.request import LoRARequest

from pullfill.engine.adapters import identity
from pullfill.errors import BadMessage, PeerUnavailable, PullfillError
from pullfill.runtime import log
from pullfill.wire import MAX_TEXT, AdapterRecord

if TYPE_CHECKING:
    from pullfill.engine.front_client import DecodePort

_log = log.get("engine.front_adapters")


class Board(Protocol):
    """The adapters in etcd. `registry.adapters` implements it. Raises RegistryUnavailable."""

    async def keep(self, record: AdapterRecord) -> AdapterRecord: ...

    async def look(self, name: str) -> None: ...

    async def forget(self, name: str) -> None: ...


class FrontAdapters:
    """See the module. Event loop only.

    served: what vLLM's frontend serves, by name. vLLM writes to it, too.
    timeout_s: how long decode workers may take to load an adapter."""

    def __init__(self, workers: DecodePort, board: Board, timeout_s: float) -> None:
        self._workers = workers
        self._board = board
        self._timeout_s = timeout_s
        self.served: dict[str, LoRARequest] = {}
        self._known: dict[str, AdapterRecord] = {}
        self._unread: dict[str, LoRARequest] = {}
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._has_worker = False

    def follow(self, models: Any) -> None:
        """Serve what is in etcd from now on. models: vLLM's OpenAIServingModels."""
        self.served.update(models.lora_requests)
        models.lora_requests = self.served
        unload_here: Callable[[Any], Any] = models.unload_lora_adapter
        resolve_here: Callable[[str], Any] = models.resolve_lora

        async def unload(request: Any) -> Any:
            served = self.served.get(request.lora_name)
            answer = await unload_here(request)
            if served is not None and isinstance(answer, str):  # else vLLM's error
                try:
                    await self._board.forget(request.lora_name)
                except PullfillError as exc:
                    self.served[request.lora_name] = served
                    raise HTTPException(503, f"not unloaded: {exc}") from None
                self._drop(request.lora_name)
            return answer

        async def resolve(name: str) -> Any:
            # Another frontend may have loaded it a moment ago.
            with contextlib.suppress(PullfillError, UnicodeError):
                await self._board.look(name)
            return self.served.get(name) or await resolve_here(name)

        models.unload_lora_adapter, models.resolve_lora = unload, resolve

    def on_change(self, name: str, record: AdapterRecord | None) -> None:
        """Take what etcd says of an adapter. None: it was unloaded."""
        if name in self._unread:
            return  # it is about to be loaded here, after what etcd tells
        if record is None:
            self._drop(name)
        elif (known := self._known.get(name)) is None or known.number <= record.number:
            self._known[name] = record
            self.served[name] = LoRARequest(
                name, record.number, record.path, is_3d_lora_weight=record.layout_3d
            )

    async def add(self, asked: LoRARequest) -> None:
        """Load an adapter that vLLM's frontend is asked to load.

        Raises PeerUnavailable (a worker cannot load it, or they have different files),
        RegistryUnavailable."""
        if self._has_worker:
            await self._read(asked)
        else:
            self._unread[asked.lora_name] = asked
        # vLLM sets it. Where it finds one, it warns that KV of the old files may be reused.
        self.served.pop(asked.lora_name, None)

    def joined(self) -> None:
        """A worker takes requests now: have it read what was not read yet."""
        self._has_worker = True
        if self._unread and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._read_all(), name="read-adapters")

    async def identify(self, request: Any) -> None:
        """Set the identity of an EngineCoreRequest's adapter. Raises as `add`, and BadMessage."""
        name = request.lora_request.lora_name
        if name in self._unread:
            await self._read_unread(name)
        if (record := self._known.get(name)) is None:
            raise BadMessage(f"LoRA adapter {name} was unloaded")
        request.lora_request = _as_sent(record)
        # vLLM calls features that were computed with an adapter by its name.
        for feature in request.mm_features or ():
            if feature.identifier.startswith(f"{name}:"):
                rest = feature.identifier.removeprefix(name)
                feature.identifier = request.lora_request.lora_name + rest

    async def _read_all(self) -> None:
        for name in list(self._unread):
            try:
                await self._read_unread(name)
            except PullfillError as exc:  # the next request with it tries again
                _log.warning("LoRA adapter %s is not loaded yet: %s", name, exc)

    async def _read_unread(self, name: str) -> None:
        async with self._reading:
            if (asked := self._unread.get(name)) is not None:
                await self._read(asked)

    async def _read(self, asked: LoRARequest) -> None:
        name, path = asked.lora_name, asked.lora_path
        if max(len(name), len(path)) > MAX_TEXT:
            raise BadMessage(f"an adapter's name and path have {MAX_TEXT} characters at most")
        answers = await self._workers.call("add_lora", (asked,), self._timeout_s)
        if len(contents := set(answers)) > 1:
            raise PeerUnavailable(
                f"the decode workers have different files of LoRA adapter {name} at {path}: give "
                "all of them the same files, and load it again"
            )
        record = AdapterRecord(
            name=name, path=path, content=contents.pop(), layout_3d=asked.is_3d_lora_weight
        )
        record = await self._board.keep(record)
        self._unread.pop(name, None)
        self.on_change(name, record)
        try:
            await self._workers.call("add_lora", (_as_sent(record),), self._timeout_s)
        except PeerUnavailable as exc:  # each request brings the same, or is refused there
            _log.warning("LoRA adapter %s is loaded, but not everywhere yet: %s", name, exc)

    def _drop(self, name: str) -> None:
        for known in (self.served, self._known, self._unread):
            known.pop(name, None)


def _as_sent(record: AdapterRecord) -> LoRARequest:
    """Return what decode workers get."""
    return LoRARequest(
        identity(record.name, record.content), record.number, record.path,
        is_3d_lora_weight=record.layout_3d,
    )  # fmt: skip
