"""libnccl through ctypes: the calls that a two-rank, nonblocking communicator takes.

A call that cannot end at once returns ncclInProgress and goes on in a thread of NCCL's. `Nccl.busy`
tells when it has ended.

Not thread-safe for one GPU: the thread of `device.py` makes all calls.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pullfill.errors import TransferFailed

RANKS = 2
# Thread blocks of a communicator's kernel, at most. Each takes a multiprocessor while it runs, and
# about 6.5 MB of GPU memory. NCCL_MAX_CTAS in the environment overrides it.
MAX_CTAS = 8
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UINT8 = 1  # ncclDataType_t
MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
UNIQUE_ID_BYTES = 128
# Without the GIL: the end of a group of aborts waits for the GPU. Other groups return at once.
_REAL_NAMES = {"ncclGroupEndOfAborts": "ncclGroupEnd"}
_SONAME = "libnccl.so.2"
_QUICK = ("ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv")
_INT = ctypes.c_int
_COMM = _STREAM = ctypes.c_void_p


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17. Newer releases read it too: `version` and `size` say which fields
    it has. The others keep their defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", _INT),
        ("cga_cluster_size", _INT),
        ("min_ctas", _INT),
        ("max_ctas", _INT),
        ("net_name", ctypes.c_char_p),
    )


CONFIG_VERSION = 21700


def nonblocking() -> Config:
    """NCCL_CONFIG_INITIALIZER, made nonblocking and with fewer thread blocks."""
    # Only then NCCL allows an abort at any moment (NCCL's manual, "Fault Tolerance").
    return Config(
        size=ctypes.sizeof(Config), magic=MAGIC, version=CONFIG_VERSION, blocking=0,
        cga_cluster_size=UNDEFINED, min_ctas=UNDEFINED, max_ctas=MAX_CTAS, net_name=None,
    )  # fmt: skip


_TYPES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.c_void_p,),
    "ncclGetErrorString": (_INT,),
    "ncclGetLastError": (_COMM,),
    "ncclGetUniqueId": (ctypes.c_void_p,),
    "ncclCommInitRankConfig": (ctypes.c_void_p, _INT, UniqueId, _INT, ctypes.c_void_p),
    "ncclCommGetAsyncError": (_COMM, ctypes.c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclGroupEndOfAborts": (),
    "ncclSend": (ctypes.c_void_p, ctypes.c_size_t, _INT, _INT, _COMM, _STREAM),
    "ncclRecv": (ctypes.c_void_p, ctypes.c_size_t, _INT, _INT, _COMM, _STREAM),
    "ncclCommRevoke": (_COMM, _INT),
    "ncclCommAbort": (_COMM,),
}


@dataclass(frozen=True, slots=True)
class NcclMove:
    """One send or receive of NCCL: `nbytes` at `address`."""

    send: bool
    address: int
    nbytes: int


def load() -> Any:
    """The functions of libnccl, by name. Raises TransferFailed.

    The library is the one that torch or LD_PRELOAD brought, else that of the nvidia-nccl package,
    else the system's."""
    try:
        path, already = _SONAME, ctypes.CDLL(_SONAME, os.RTLD_NOLOAD | os.RTLD_NOW)
        del already
    except OSError:
        path = _packaged() or _SONAME
    try:
        # Calls that return at once keep the GIL: giving it up costs up to a switch interval beside
        # a busy engine thread.
        library, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
    except OSError as exc:
        raise TransferFailed(
            f"NCCL does not load ({exc}): torch for CUDA brings it, or install nvidia-nccl-cu13"
        ) from exc
    loaded = SimpleNamespace()
    for name, types in _TYPES.items():
        try:
            function = getattr(quick if name in _QUICK else library, _REAL_NAMES.get(name, name))
        except AttributeError as exc:
            raise TransferFailed(f"NCCL 2.28.7 or newer is needed: this one has no {name}") from exc
        function.argtypes = types
        setattr(loaded, name, function)
    for name in ("ncclGetErrorString", "ncclGetLastError"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def _packaged() -> str | None:
    """The library file of the nvidia-nccl-cu12 or -cu13 package."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (path := Path(folder, "lib", _SONAME)).exists():
            return str(path)
    return None


def blocking_forced() -> str | None:
    """Why communicators cannot be nonblocking here, for people."""
    value, where = setting("NCCL_COMM_BLOCKING")
    if value in ("", "0"):
        return None
    return (
        f"NCCL_COMM_BLOCKING={value} in {where}, and a blocking communicator cannot be aborted "
        "safely: remove it there"
    )


class Nccl:
    """The library with Python's types. Every call raises TransferFailed with NCCL's words for an
    error, and nothing else. The communicator must then be aborted."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def version(self) -> int:
        """As NCCL writes it: 22903 is 2.29.3. Any thread."""
        number = _INT()
        self._check("ncclGetVersion", self._library.ncclGetVersion(ctypes.byref(number)))
        return number.value

    def unique_id(self) -> bytes:
        """The id under which both ranks meet. Opens a port."""
        made = UniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def init(
        self, unique_id: bytes, rank: int, ranks: int = RANKS
    ) -> tuple[int | None, TransferFailed | None]:
        """Begin to make a communicator on the thread's GPU. It is ready when it is not `busy`.

        Returns the communicator, and the error if NCCL reported one. After an error there may be a
        communicator all the same: `abort` frees it.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise TransferFailed(f"an NCCL id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
        comm, config = ctypes.c_void_p(), nonblocking()
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(comm),
            ranks,
            UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        try:
            self._check("ncclCommInitRankConfig", code)
        except TransferFailed as exc:
            return comm.value, exc
        return comm.value, None

    def busy(self, comm: int) -> bool:
        """Whether the last call on `comm` still goes on in the background. Raises also when
        something that was queued earlier failed."""
        state = _INT()
        code = self._library.ncclCommGetAsyncError(ctypes.c_void_p(comm), ctypes.byref(state))
        self._check("ncclCommGetAsyncError", code)
        self._check("NCCL", state.value)
        return state.value == IN_PROGRESS

    def issue(self, comm: int, messages: Sequence[NcclMove], peer: int, stream: int) -> None:
        """Begin to queue all messages as one group. They are on the stream when the communicator is
        not `busy` any more. Until then the stream says nothing about them."""
        library, handle, on = self._library, ctypes.c_void_p(comm), ctypes.c_void_p(stream)
        self._check("ncclGroupStart", library.ncclGroupStart())
        code = SUCCESS
        for message in messages:
            move = library.ncclSend if message.send else library.ncclRecv
            address, count = ctypes.c_void_p(message.address), ctypes.c_size_t(message.nbytes)
            code = move(address, count, UINT8, peer, handle, on)
            if code not in (SUCCESS, IN_PROGRESS):
                break
        ended = library.ncclGroupEnd()  # also after an error: a group is the thread's
        self._check("ncclSend or ncclRecv", code)
        self._check("ncclGroupEnd", ended)

    def revoke(self, comm: int) -> None:
        """Begin to end what runs on the GPU. It has ended when the communicator is not `busy` any
        more. Frees nothing. Not allowed while an `init` or `issue` is under way."""
        # NCCL 2.30.7 would then use its own task after it freed it (ncclCommEnsureReady).
        self._check("ncclCommRevoke", self._library.ncclCommRevoke(ctypes.c_void_p(comm), 0))

    def abort(self, comms: Sequence[int]) -> None:
        """Stop everything that these communicators do, and free them. They are gone afterwards,
        also if this raises. Blocks until every kernel on the GPU has ended."""
        # One group, so that no abort waits for a kernel that another one stops (NCCL 2.22 and
        # newer). `ncclCommAbort` only stops the kernel and waits for the thread that launches it.
        # `ncclGroupEnd` frees GPU memory, and that waits for every kernel.
        library = self._library
        self._check("ncclGroupStart", library.ncclGroupStart())
        codes = [library.ncclCommAbort(ctypes.c_void_p(comm)) for comm in comms]
        ended = library.ncclGroupEndOfAborts()
        for code in codes:
            self._check("ncclCommAbort", code)
        self._check("ncclGroupEnd", ended)

    def _check(self, what: str, code: int) -> None:
        if code in (SUCCESS, IN_PROGRESS):
            return
        text = self._library.ncclGetErrorString(code).decode(errors="replace")
        last = (self._library.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        raise TransferFailed(f"{what}: {text}" + (f" ({last})" if last else ""))


SYSTEM = Path("/etc/nccl.conf")


def setting(name: str) -> tuple[str, str]:
    """The value of a setting of NCCL's, and where it is set, for people. Both are empty if it is
    not set."""
    # As NCCL reads it (NCCL's manual, "Environment Variables"): the environment, then the files, of
    # which the first that has the setting counts. A line is `NAME=VALUE`, without spaces around the
    # `=`. Plugins that set NCCL's environment (NCCL_ENV_PLUGIN) are not asked.
    if (value := os.environ.get(name)) is not None:
        return value.strip(), "the environment"
    for path in _files():
        try:
            lines = path.read_text(errors="replace").split("\n")
        except OSError:  # NCCL too goes on without it
            continue
        for line in lines:
            key, equals, value = line.partition("=")
            if equals and key == name:
                return value.strip(), str(path)
    return "", ""


def _files() -> Iterator[Path]:
    if named := os.environ.get("NCCL_CONF_FILE"):
        yield Path(named)
    else:
        # NCCL 2.30 asks HOME, older releases the user database.
        for home in dict.fromkeys((os.environ.get("HOME"), _home_of_user())):
            if home:
                yield Path(home, ".nccl.conf")
    yield SYSTEM


def _home_of_user() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user without an entry
        return None
