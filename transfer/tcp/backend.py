"""The payload on the protocol's own socket: gathered from KV memory by the kernel, scattered into
it by the kernel. No copy in this process, and no Python object per run.

Both ends wait inside one system call per 1024 runs (`sendmsg`, `recvmsg` with MSG_WAITALL), with
the GIL given up: beside a busy engine thread each return costs, so there are few.
"""

from __future__ import annotations

import ctypes
import errno
import socket
from collections.abc import Callable

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.stream.backend_contract import Backend, Runs, StreamConnection
from pullfill.transfer.stream.batches import Iovec
from pullfill.transfer.stream.socket_connection import SocketConnection, reason

_IOV_MAX = 1024
_SCRATCH = 256 << 10

_libc = ctypes.CDLL(None, use_errno=True)  # gives the GIL up


class _MsgHdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_Call = Callable[[int, object, int], int]
for _name in ("sendmsg", "recvmsg"):
    getattr(_libc, _name).argtypes = [ctypes.c_int, ctypes.POINTER(_MsgHdr), ctypes.c_int]
    getattr(_libc, _name).restype = ctypes.c_ssize_t


class TcpBackend:
    """A Backend. Borrows the link's socket."""

    setup = b""

    def __init__(self) -> None:
        self._link: StreamConnection | None = None
        self._scratch = b""

    def start(self, link: StreamConnection, theirs: bytes) -> None:
        self._link = link

    def send(self, runs: Runs) -> None:
        """See Backend. The bytes are the kernel's when it returns."""
        self._move(_libc.sendmsg, socket.MSG_NOSIGNAL, runs.iovec)

    def receive(self, runs: Runs) -> None:
        """See Backend."""
        self._move(_libc.recvmsg, socket.MSG_WAITALL, runs.iovec)

    def discard(self, nbytes: int) -> None:
        """See Backend."""
        assert self._link is not None
        scratch = ctypes.create_string_buffer(min(nbytes, _SCRATCH))
        while nbytes:
            want = min(nbytes, len(scratch))
            got = _libc.recv(self._link.fd, scratch, ctypes.c_size_t(want), socket.MSG_WAITALL)
            if got <= 0:
                _fail(got)
            nbytes -= got

    def interrupt(self) -> None:
        link = self._link  # `close` may come meanwhile
        if isinstance(link, SocketConnection):
            link.interrupt()

    def close(self) -> None:
        self._link = None

    def _move(self, call: _Call, flags: int, iovec: Iovec) -> None:
        assert self._link is not None
        fd = self._link.fd
        for first in range(0, len(iovec), _IOV_MAX):
            chunk = iovec[first : first + _IOV_MAX]
            left = int(chunk[:, 1].sum())
            while left:
                header = _MsgHdr(iov=chunk.ctypes.data, iovlen=len(chunk))
                got = call(fd, ctypes.byref(header), flags)
                if got <= 0:
                    if got < 0 and ctypes.get_errno() == errno.EINTR:
                        continue
                    _fail(got)
                left -= got
                if left:
                    chunk = _after(chunk, got)


def _after(chunk: Iovec, done: int) -> Iovec:
    """What is left of `chunk` after its first `done` bytes."""
    rest = chunk.copy()
    for index, nbytes in enumerate(rest[:, 1].tolist()):
        if done < nbytes:
            rest[index, 0] += done
            rest[index, 1] -= done
            return rest[index:]
        done -= nbytes
    return rest[:0]


def _fail(got: int) -> None:
    code = ctypes.get_errno()
    raise TransferFailed("the connection is closed" if got == 0 else reason(code))


class TcpKind:
    """The BackendKind."""

    name = "tcp"
    batch_bytes = 16 << 20
    """What both sides do between batches costs a tenth of the speed at 4 MiB. A revoke does not
    wait for a long one: it interrupts."""

    def why_not(self) -> str | None:
        return None

    def detail(self, memory: LocalMemory) -> str | None:
        return "" if memory.device is None else None

    def can_reach(self, detail: str) -> str | None:
        return None

    def make(self, memory: LocalMemory, *, owner: bool) -> Backend:
        return TcpBackend()

    def close(self) -> None:
        """Nothing is shared."""
