"""Loads LoRA adapters into an engine, and identifies them by a digest of their files.

Name and path do not identify an adapter: its files may change, and another machine may have other
files at that path. So a job carries a digest of the files. A prefill worker uses its own files only
if they have the same digest.

An adapter has a number in the engine (`lora_int_id`). Each frontend counts by itself, so two
frontends may give one number to two adapters. So each worker replaces it by a number of its own.
No number is used twice, because vLLM keeps an adapter whose loading failed halfway, and would take
it for the next one with its number.

vLLM loads an adapter when a step needs it, and a failure there ends the engine. So `Adapters` loads
it before its first request enters the engine, and a failure ends that request only. vLLM holds
`--max-cpu-loras` adapters, and loads others again from their files in a step. So `Adapters` loads
files that have changed before the next request enters.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pullfill.errors import BadMessage
from pullfill.runtime import log
from pullfill.runtime.lanes import Lane

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = log.get("engine.adapters")

_CHUNK = 1 << 20
_FILES = "adapter_*"
"""The files that vLLM loads. Others in the directory differ from machine to machine: a download
leaves its time there, and a training its checkpoints."""


def content(path: str) -> str:
    """Return a digest of the names and bytes of the files that vLLM loads: 32 hex digits.

    Takes tens of ms for 100 MB. Raises OSError or ValueError.

    path: the adapter's directory."""
    from blake3 import blake3

    files = _files(path)
    if not files:
        raise FileNotFoundError(f"no adapter at {path}")
    digest = blake3()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest(length=16)


def lora_request(name: str, path: str) -> LoRARequest:
    """Return vLLM's LoRARequest for `Adapters.load`, which sets the number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


def _add(worker: Any, adapter: LoRARequest) -> str:
    """Load an adapter in one rank. Returns why that failed. Empty: it is loaded.

    It must not raise: vLLM would leave the answers of other ranks unread, and take them for those
    of its next call. That is a step, which then fails.

    worker: vLLM's worker of the rank."""
    try:
        worker.add_lora(adapter)
    except Exception as exc:
        return str(exc) or repr(exc)
    return ""


def _remove(worker: Any, number: int) -> None:
    """Remove an adapter in one rank. It must not raise either."""
    with contextlib.suppress(Exception):
        worker.remove_lora(number)


class Adapters:
    """The adapters of one engine. Engine thread, except where a method says otherwise.

    read: computes the digest of an adapter's files."""

    def __init__(self, read: Callable[[str], str] = content) -> None:
        self._read = read
        self._given = 0
        self._loaded: dict[tuple[str, str], LoRARequest] = {}
        self._seen: dict[tuple[str, str], object] = {}
        self._before: dict[tuple[str, str], str | None] = {}
        self._contents: dict[int, str] = {}

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
        """Load an adapter if the engine lacks it, or if its files have changed where vLLM may have
        dropped it. Returns its LoRARequest with our number.

        The engine takes no step meanwhile. Raises BadMessage if the adapter cannot be loaded.

        asked: the LoRARequest as the client's frontend made it.
        again: load it even if the engine has it."""
        if core.vllm_config.lora_config is None:
            raise BadMessage(
                f"LoRA adapter {asked.lora_name}: this worker was started without --enable-lora"
            )
        key = asked.lora_name, asked.lora_path
        loaded = self._loaded.get(key)
        if loaded is not None and not again and self._as_loaded(core, loaded):
            return loaded
        self._given += 1
        own = msgspec.structs.replace(asked, lora_int_id=self._given, load_inplace=False)
        seen = _signature(own.lora_path)
        if why := next(filter(None, core.collective_rpc(_add, args=(own,))), ""):
            core.collective_rpc(_remove, args=(own.lora_int_id,))
            raise BadMessage(f"LoRA adapter {asked.lora_name} cannot be loaded: {why}")
        before = None
        if loaded is not None:
            before = self._contents.pop(loaded.lora_int_id, "")
            if not before and self._seen[key] == seen:
                before = self._before[key]  # the same files, whose digest is not known yet
        self._loaded[key], self._seen[key], self._before[key] = own, seen, before
        look = threading.Thread(
            target=self._look, args=(own, before, seen), name="pullfill-adapter"
        )
        look.daemon = True
        look.start()
        return own

    def _as_loaded(self, core: Any, loaded: LoRARequest) -> bool:
        """Whether the engine still has the adapter, or would load the same files again."""
        if self._given <= core.vllm_config.lora_config.max_cpu_loras:
            return True
        seen = self._seen[loaded.lora_name, loaded.lora_path]
        return _signature(loaded.lora_path) == seen or loaded.lora_int_id in core.list_loras()

    def content_of(self, adapter: LoRARequest) -> str:
        """Return the digest of a loaded adapter's files. Any thread.

        Empty: it is not known yet, or prompts with this adapter must be prefilled here.

        adapter: as `load` has returned it."""
        return self._contents.get(adapter.lora_int_id, "")

    def same(self, name: str, path: str, content: str) -> LoRARequest | None:
        """Return the loaded adapter with this name and path, if its files have this digest."""
        own = self._loaded.get((name, path))
        return own if own is not None and content and self.content_of(own) == content else None

    def _look(self, own: LoRARequest, before: str | None, seen: object) -> None:
        """Compute the digest of the files that were loaded.

        before: their digest at the load before this one. Empty: not known. None: there was none.
        seen: their signature before they were loaded."""
        name, number = own.lora_name, own.lora_int_id
        try:
            found = self._read(own.lora_path)
        except (OSError, ValueError) as exc:
            logger.warning("prompts for LoRA adapter %s are prefilled here: %s", name, exc)
            return
        if _signature(own.lora_path) != seen:
            logger.warning(
                "prompts for LoRA adapter %s are prefilled here: its files changed while they were "
                "loaded; load changed files from another path", name,
            )  # fmt: skip
        elif before is not None and found != before:
            # vLLM knows cached KV by the adapter's name and path. A prefill worker would read KV of
            # the old files as a prefix, keep it, and bring it to other decode workers too.
            logger.warning(
                "prompts for LoRA adapter %s are prefilled here: KV of its old files may be in the "
                "prefix cache; load changed files from another path", name,
            )  # fmt: skip
        elif own.is_3d_lora_weight:
            logger.info(
                "prompts for LoRA adapter %s are prefilled here: its weights of experts are in the "
                "3D layout, which a job does not tell", name,
            )  # fmt: skip
        elif self._loaded.get((name, own.lora_path)) is own:
            self._contents[number] = found


class AdapterFiles:
    """Digests of adapter files on this machine, cached until a file changes."""

    # A drive may hang. So each path is read on a thread that nothing else needs.

    def __init__(self, read: Callable[[str], str] = content) -> None:
        self._read = read
        self._known: dict[str, tuple[object, str]] = {}
        self._reading: dict[str, asyncio.Future[str]] = {}

    async def content(self, path: str) -> str:
        """Return the digest of an adapter's files. Empty: they cannot be read. Those who ask while
        they are read share the answer."""
        reading = self._reading.get(path)
        if reading is None:
            loop = asyncio.get_running_loop()
            reading = self._reading[path] = loop.run_in_executor(Lane(), self._content, path)
            reading.add_done_callback(lambda _: self._reading.pop(path))
        return await asyncio.shield(reading)

    def _content(self, path: str) -> str:
        try:
            seen = _signature(path)
            known = self._known.get(path)
            if known is None or known[0] != seen:
                known = self._known[path] = seen, self._read(path)
        except (OSError, ValueError):
            return ""
        return known[1]


def _files(path: str) -> list[Path]:
    return sorted(file for file in Path(path).glob(_FILES) if file.is_file())


def _signature(path: str) -> object:
    """Return name, size, time and inode of each file. So a change shows without reading it.

    None: the files cannot be seen."""
    try:
        stats = {file.name: file.stat() for file in _files(path)}
    except (OSError, ValueError):
        return None
    return [(name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats.items()]
