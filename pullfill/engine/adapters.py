"""LoRA adapters, known by what their files hold.

A name or a path does not say what an adapter is: its files may change, and another machine may have
other files there. So a job carries a digest of the files, and a prefill worker computes with its
own files only if they have the same digest.

vLLM keeps an adapter under a number that each frontend gives it. Two frontends may give one number
to two adapters. So each worker gives its own numbers.

vLLM loads an adapter when a step needs it, and a failure there ends the engine. So an adapter is
loaded before its first request enters the engine, and a failure ends that request only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pullfill.errors import BadMessage
from pullfill.runtime import log

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = log.get("engine.adapters")

_CHUNK = 1 << 20


def content(path: str) -> str:
    """Return 32 hex digits over the names and bytes of all files of an adapter.

    Reads them: tens of ms for 100 MB. Raises OSError."""
    from blake3 import blake3

    files = sorted(file for file in Path(path).rglob("*") if file.is_file())
    if not files:
        raise FileNotFoundError(f"no adapter at {path}")
    digest = blake3()
    for file in files:
        digest.update(f"{file.relative_to(path)}:{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest(length=16)


def lora_request(name: str, path: str) -> LoRARequest:
    """Return a request for an adapter, for `Adapters.load`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


class Adapters:
    """The adapters of one engine. Engine thread, except where a method says otherwise.

    read: computes the digest of an adapter's files."""

    def __init__(self, read: Callable[[str], str] = content) -> None:
        self._read = read
        self._loaded: dict[tuple[str, str], LoRARequest] = {}
        self._contents: dict[tuple[str, str], str] = {}

    def add(self, core: Any, fields: Any) -> bool:
        """Do what vLLM's `add_lora` does, for a frontend. fields: of vLLM's LoRARequest.

        Raises BadMessage."""
        from vllm.lora.request import LoRARequest

        try:
            asked = msgspec.convert(fields, LoRARequest)
        except (msgspec.ValidationError, AssertionError) as exc:
            raise BadMessage(f"not a LoRA request: {exc}") from exc
        self.load(core, asked, again=asked.load_inplace)
        return True

    def admit(self, core: Any, request: Any) -> None:
        """Have the engine load the adapter of a request, if it has one. Raises BadMessage."""
        if request.lora_request is not None:
            request.lora_request = self.load(core, request.lora_request)

    def load(self, core: Any, asked: LoRARequest, *, again: bool = False) -> LoRARequest:
        """Have the engine load an adapter, unless it has. Returns it with this worker's number.

        The engine stands still meanwhile. Raises BadMessage, which says why it cannot be loaded.

        again: load it even if the engine has it."""
        if core.vllm_config.lora_config is None:
            raise BadMessage(
                f"LoRA adapter {asked.lora_name}: this worker was started without --enable-lora"
            )
        key = asked.lora_name, asked.lora_path
        loaded = self._loaded.get(key)
        if loaded is not None and not again:
            return loaded
        number = loaded.lora_int_id if loaded is not None else len(self._loaded) + 1
        own = msgspec.structs.replace(asked, lora_int_id=number, load_inplace=False)
        try:
            core.add_lora(msgspec.structs.replace(own, load_inplace=loaded is not None))
        except Exception as exc:
            raise BadMessage(f"LoRA adapter {asked.lora_name} cannot be loaded: {exc}") from exc
        self._loaded[key] = own
        self._contents.pop(key, None)
        look = threading.Thread(target=self._look, args=(own,), name="pullfill-adapter")
        look.daemon = True
        look.start()
        return own

    def content_of(self, adapter: LoRARequest) -> str:
        """Return the digest of a loaded adapter's files. Empty: it is not known yet. Any thread."""
        return self._contents.get((adapter.lora_name, adapter.lora_path), "")

    def _look(self, own: LoRARequest) -> None:
        """Read the files right after they were loaded: later they may have changed."""
        key = own.lora_name, own.lora_path
        try:
            found = self._read(own.lora_path)
        except OSError as exc:
            logger.warning("prompts for LoRA adapter %s are prefilled here: %s", key[0], exc)
            return
        if self._loaded.get(key) is own:
            self._contents[key] = found


class AdapterFiles:
    """Digests of adapters on this machine. Files are read again when one has changed."""

    def __init__(self, read: Callable[[str], str] = content) -> None:
        self._read = read
        self._known: dict[str, tuple[object, str]] = {}

    async def content(self, path: str) -> str:
        """Return the digest of an adapter's files. Empty: they cannot be read."""
        return await asyncio.to_thread(self._content, path)

    def _content(self, path: str) -> str:
        try:
            seen = _signature(path)
            known = self._known.get(path)
            if known is None or known[0] != seen:
                known = self._known[path] = seen, self._read(path)
        except OSError:
            return ""
        return known[1]


def _signature(path: str) -> object:
    """What changes when a file does, as far as that can be seen without reading it."""
    stats = {str(file): file.stat() for file in Path(path).rglob("*")}
    return sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats.items())
