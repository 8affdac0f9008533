"""Loads LoRA adapters into an engine. An adapter is what its files say.

Inside workers an adapter is called `NAME@DIGEST`, its *identity*, with a digest of its files. vLLM
makes this name part of its block hashes, so KV of other files is never a prefix hit. Frontends send
it with a request, jobs carry both parts, and no worker uses files that have another digest.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from pullfill.errors import BadMessage
from pullfill.runtime.lifecycle import at_leave
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.wire import MAX_TEXT, Adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_CHUNK = 1 << 20
# The files that vLLM loads. Others in the directory differ from machine to machine: a download
# leaves its time there, and a training its checkpoints.
_FILES = "adapter_*"
_IDENTITY = re.compile(r"(.*)@([0-9a-f]{32}(?:-3d)?)", re.DOTALL)
# Ends the digest of an adapter whose weights of experts are in the 3D layout. The same files would
# be another adapter without it.
_3D = "-3d"


def identity(name: str, content: str) -> str:
    """Return what an adapter is called inside workers. content: see `Adapters.adding`."""
    return f"{name}@{content}"


def parted(name: str) -> tuple[str, str]:
    """Return (name, content) of an identity, or (name, "") of a name as users know it."""
    found = _IDENTITY.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def content(path: str, copy: Callable[[str], IO[bytes]] | None = None) -> str:
    """Return a digest of the names and bytes of the files that vLLM loads: 32 hex digits.

    Takes tens of ms for 100 MB. Raises OSError or ValueError.

    path: the adapter's directory.
    copy: takes the name of a file. Returns where its bytes are written, too. It is closed."""
    from blake3 import blake3

    files = sorted(file for file in Path(path).glob(_FILES) if file.is_file())
    if not files:
        raise FileNotFoundError(f"no adapter at {path}")
    digest = blake3()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as opened, copy(file.name) if copy else nullcontext() as copied:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
                if copied is not None:
                    copied.write(chunk)
    return digest.hexdigest(length=16)


def lora_request(adapter: Adapter) -> LoRARequest:
    """Return vLLM's LoRARequest for an adapter that another worker has told us of."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(identity(adapter.name, adapter.content), 1, adapter.path)


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
    with suppress(Exception):
        worker.remove_lora(number)


def _copied(path: str, place: str, kept: ExitStack) -> str:
    """Copy an adapter's files at `path` into a new directory `place`, until `kept` is closed.

    Returns their `content`, and raises as it does.

    The directory holds links to open files without a name. So the system frees their space when
    this process ends, however it ends. Other ranks of this machine can follow the links."""

    def new(name: str) -> IO[bytes]:
        file = tempfile.TemporaryFile()
        number = os.dup(file.fileno())
        kept.callback(os.close, number)
        Path(place, name).symlink_to(f"/proc/{os.getpid()}/fd/{number}")
        return file

    kept.callback(shutil.rmtree, place, ignore_errors=True)
    Path(place).mkdir(mode=0o700, parents=True)
    return content(path, new)


class Adapters:
    """The adapters of one engine. Engine thread, except where a method says otherwise."""

    # Name and path do not identify an adapter: its files may change, and another machine may have
    # other files at that path.
    #
    # Each worker gives an adapter a number of its own (`lora_int_id`). No number is used twice,
    # because vLLM keeps an adapter whose loading failed halfway, and would take it for the next one
    # with its number. What frontends send as number says which of two loads is the newer one.
    #
    # vLLM loads an adapter when a step needs it, and a failure there ends the engine. It holds
    # `--max-cpu-loras` adapters, and loads others again in a step. So the files are copied, and an
    # adapter is loaded before its first request enters. vLLM loads it again from the copy only.

    def __init__(self) -> None:
        self._given = 1 << 16  # the API servers of stock vLLM number theirs from 1
        self._loaded: OrderedDict[str, tuple[LoRARequest, ExitStack]] = OrderedDict()
        self._paths: dict[str, str] = {}
        self._newest: dict[str, tuple[int, str]] = {}
        # Nobody can guess the name, and make the directory before us.
        own = f"pullfill-adapters-{os.getpid()}-{secrets.token_hex(8)}"
        self._copies = os.path.join(tempfile.gettempdir(), own)

    def adding(self, fields: Any) -> Callable[[Any], str]:
        """Read the files of an adapter, for a frontend that calls vLLM's `add_lora`. Any thread.

        Returns a function that loads it on the engine thread, and raises BadMessage if that fails.
        It returns the content: a digest of the files that are at its path now. If the frontend has
        asked for an identity, its content.

        fields: those of vLLM's LoRARequest, as they came over the wire."""
        failure = None
        try:
            asked = _converted(fields)
            named = self.named(asked if parted(asked.lora_name)[1] else _identified(asked))
        except BadMessage as exc:
            failure = exc

        def load(core: Any) -> str:
            if failure is not None:
                raise failure
            if named.lora_name == asked.lora_name:
                self._check_newest(asked)
            self.load(core, named)
            return parted(named.lora_name)[1]

        return load

    def named(self, asked: LoRARequest) -> LoRARequest:
        """Note the path of an adapter. Returns its LoRARequest as `placed` does.

        To be called before vLLM hashes the prompt. Any thread.

        asked: its name is an identity."""
        if asked.lora_name not in self._loaded:
            self._paths[asked.lora_name] = asked.lora_path
        return self.placed(asked)

    def placed(self, asked: LoRARequest) -> LoRARequest:
        """Return a LoRARequest with the place of our copy as path. vLLM hashes the path, too, so it
        is always the same here. Any thread."""
        name = asked.lora_name.encode("utf-8", "surrogatepass")
        place = os.path.join(self._copies, blake2b(name, digest_size=16).hexdigest())
        return msgspec.structs.replace(asked, lora_path=place)

    def admit(self, core: Any, request: Any) -> None:
        """Load the adapter of a request, if it has one, and set this worker's number.

        Raises BadMessage."""
        if request.lora_request is not None:
            self._check_newest(request.lora_request)
            request.lora_request = self.load(core, request.lora_request)

    def load(self, core: Any, asked: LoRARequest) -> LoRARequest:
        """Load an adapter if the engine lacks it. Returns its LoRARequest with our number.

        The engine takes no step meanwhile. Raises BadMessage if the adapter cannot be loaded, or if
        its files are not those of its identity.

        asked: as `named` has returned it."""
        if core.vllm_config.lora_config is None:
            name = parted(asked.lora_name)[0]
            raise BadMessage(f"LoRA adapter {name}: this worker was started without --enable-lora")
        if asked.lora_name not in self._loaded:
            self._loaded[asked.lora_name] = self._load(core, asked)
            self._make_room(core)
        self._loaded.move_to_end(asked.lora_name)  # the one that was used last is forgotten last
        return self._loaded[asked.lora_name][0]

    def _load(self, core: Any, asked: LoRARequest) -> tuple[LoRARequest, ExitStack]:
        name, told = parted(asked.lora_name)
        path = self._paths[asked.lora_name] = _resolved(self._paths[asked.lora_name])
        self._given += 1
        own = msgspec.structs.replace(asked, lora_int_id=self._given, load_inplace=False)
        if not os.path.exists(self._copies):
            at_leave(partial(shutil.rmtree, self._copies, ignore_errors=True))
        with ExitStack() as copy:
            read = partial(_copied, place=own.lora_path, kept=copy)
            if _content(name, path, own.is_3d_lora_weight, read) != told:
                raise BadMessage(
                    f"LoRA adapter {name}: {path} has other files than those that were loaded "
                    "first: give all workers the same files, and load it again"
                )
            if why := next(filter(None, core.collective_rpc(_add, args=(own,))), ""):
                core.collective_rpc(_remove, args=(own.lora_int_id,))
                why = why.replace(own.lora_path, path).replace(own.lora_name, name)
                raise BadMessage(f"LoRA adapter {name} cannot be loaded: {why}")
            return own, copy.pop_all()

    def _make_room(self, core: Any) -> None:
        """Forget adapters beyond `--max-cpu-loras`, those first that were used longest ago.

        Those of requests in the engine stay, because vLLM may load them again. So does the last."""
        most = core.vllm_config.lora_config.max_cpu_loras
        adapters = [request.lora_request for request in core.scheduler.requests.values()]
        used = {adapter.lora_name for adapter in adapters if adapter is not None}
        for name in [name for name in self._loaded if name not in used][:-1]:
            if len(self._loaded) <= most:
                return
            self._loaded.pop(name)[1].close()

    def _check_newest(self, asked: LoRARequest) -> None:
        """Refuse an adapter if a newer load of its name has brought other files.

        A frontend may not know yet that another one has loaded the adapter again."""
        name, told = parted(asked.lora_name)
        number, newest = self._newest.get(name, (0, told))
        if asked.lora_int_id < number and told != newest:
            raise BadMessage(
                f"LoRA adapter {name} was loaded again with other files: send the request again"
            )
        self._newest[name] = max((asked.lora_int_id, told), (number, newest))

    def has(self, adapter: Adapter) -> bool:
        """Whether an adapter that another worker has told us of is loaded. Any thread."""
        return identity(adapter.name, adapter.content) in self._loaded

    def for_others(self, own: LoRARequest) -> Adapter | None:
        """Return a loaded adapter for a job, or for another decode worker. Any thread.

        None: it cannot be told. Its name or path may be too long, and a prefill worker cannot be
        told of the 3D layout.

        own: as `load` has returned it."""
        (name, told), path = parted(own.lora_name), self._paths.get(own.lora_name, "")
        if not path or told.endswith(_3D) or max(len(name), len(path)) > MAX_TEXT:
            return None
        return Adapter(name=name, path=path, content=told)


def _converted(fields: Any) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    try:
        return msgspec.convert(fields, LoRARequest)
    except (msgspec.ValidationError, AssertionError) as exc:
        raise BadMessage(f"not a LoRA request: {exc}") from exc


def _resolved(path: str) -> str:
    """Return the directory of an adapter. vLLM downloads it if the path is a name at a hub."""
    if os.path.isabs(path):
        return path
    from vllm.lora.utils import get_adapter_absolute_path

    return str(get_adapter_absolute_path(path))


def _identified(asked: LoRARequest) -> LoRARequest:
    """Return the adapter with the identity of the files that are at its path now."""
    path = _resolved(asked.lora_path)
    told = _content(asked.lora_name, path, asked.is_3d_lora_weight, content)
    return msgspec.structs.replace(asked, lora_name=identity(asked.lora_name, told), lora_path=path)


def _content(name: str, path: str, is_3d: bool, read: Callable[[str], str]) -> str:
    """Return the content of the adapter at `path`. Raises BadMessage."""
    try:
        return read(path) + _3D * is_3d
    except FileNotFoundError:
        from vllm.exceptions import LoRAAdapterNotFoundError

        raise BadMessage(str(LoRAAdapterNotFoundError(name, path))) from None  # vLLM makes it a 404
    except (OSError, ValueError) as exc:
        where = f"from {path} to {tempfile.gettempdir()} (TMPDIR)"
        raise BadMessage(f"LoRA adapter {name} cannot be copied {where}: {exc}") from exc


class AdapterFiles:
    """Digests of adapter files on this machine."""

    # A drive may hang. So each path is read on a thread that nothing else needs.

    def __init__(self, read: Callable[[str], str] = content) -> None:
        self._read = read
        self._reading: dict[str, asyncio.Future[str]] = {}

    async def content(self, path: str) -> str:
        """Return the digest of an adapter's files. Empty: they cannot be read. Those who ask while
        they are read share the answer."""
        reading = self._reading.get(path)
        if reading is None:
            loop = asyncio.get_running_loop()
            reading = self._reading[path] = loop.run_in_executor(
                SerialExecutor(), self._read_or_empty, path
            )
            reading.add_done_callback(lambda _: self._reading.pop(path))
        return await asyncio.shield(reading)

    def _read_or_empty(self, path: str) -> str:
        try:
            return self._read(path)
        except (OSError, ValueError):
            return ""
