"""Loads LoRA adapters into an engine, and identifies them by a digest of their files.

Name and path do not identify an adapter: its files may change, and another machine may have other
files at that path. So a job carries a digest of the files. A prefill worker uses its own files only
if they have the same digest.

An adapter has a number in the engine (`lora_int_id`). Each frontend counts by itself, so two
frontends may give one number to two adapters. So each worker replaces it by a number of its own.

vLLM loads an adapter when a step needs it, and a failure there ends the engine. So `Adapters` loads
it before its first request enters the engine, and a failure ends that request only.
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
    """Return a digest of the names and bytes of all files of an adapter: 32 hex digits.

    Takes tens of ms for 100 MB. Raises OSError.

    path: the adapter's directory."""
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
    """Return vLLM's LoRARequest for `Adapters.load`, which sets the number."""
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
        """Load an adapter for a frontend that calls vLLM's `add_lora`. Raises BadMessage.

        fields: those of vLLM's LoRARequest, as they came over the wire."""
        from vllm.lora.request import LoRARequest

        try:
            asked = msgspec.convert(fields, LoRARequest)
        except (msgspec.ValidationError, AssertionError) as exc:
            raise BadMessage(f"not a LoRA request: {exc}") from exc
        self.load(core, asked, again=asked.load_inplace)
        return True

    def admit(self, core: Any, request: Any) -> None:
        """Load the adapter of an EngineCoreRequest, if it has one, and set this worker's number.

        Raises BadMessage."""
        if request.lora_request is not None:
            request.lora_request = self.load(core, request.lora_request)

    def load(self, core: Any, asked: LoRARequest, *, again: bool = False) -> LoRARequest:
        """Load an adapter, unless the engine has it. Returns its LoRARequest with our number.

        The engine takes no step meanwhile. Raises BadMessage if the adapter cannot be loaded.

        asked: the LoRARequest as the client's frontend made it.
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
        """Compute the digest right after the adapter was loaded: later its files may change."""
        key = own.lora_name, own.lora_path
        try:
            found = self._read(own.lora_path)
        except OSError as exc:
            logger.warning("prompts for LoRA adapter %s are prefilled here: %s", key[0], exc)
            return
        if self._loaded.get(key) is own:
            self._contents[key] = found


class AdapterFiles:
    """Digests of adapter files on this machine, cached until a file changes."""

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
    """Return name, size, time and inode of each file. So a change shows without reading it."""
    stats = {str(file): file.stat() for file in Path(path).rglob("*")}
    return sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats.items())
