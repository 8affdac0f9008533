"""The payload on the protocol's own socket. The kernel gathers it from KV memory and scatters it
into KV memory. Nothing is copied in this process, and no run is a Python object.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.runs import Iovec
from pullfill.transfer.stream.backends import Backend, BackendKind
from pullfill.transfer.stream.kv_protocol import SocketConnection, as_failures

# Runs of one system call (`sendmsg`, `recvmsg` with MSG_WAITALL). Each call releases the GIL, and
# to get it back beside a busy engine thread takes time. So the calls are few.
_IOV_MAX = 1024

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


class TcpBackend(Backend):
    def send(self, runs: Iovec) -> None:
        """See Backend. When it returns, the kernel has the bytes."""
        self._move(_libc.sendmsg, socket.MSG_NOSIGNAL, runs)

    def receive(self, runs: Iovec) -> None:
        self._move(_libc.recvmsg, socket.MSG_WAITALL, runs)

    def _move(self, call: _Call, flags: int, iovec: Iovec) -> None:
        fd = self.link.fd
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
    """The runs that are left of `chunk` after its first `done` bytes."""
    rest = chunk.copy()
    for index, nbytes in enumerate(rest[:, 1].tolist()):
        if done < nbytes:
            rest[index, 0] += done
            rest[index, 1] -= done
            return rest[index:]
        done -= nbytes
    return rest[:0]


def _fail(got: int) -> None:
    if got == 0:
        raise TransferFailed("the connection is closed")
    code = ctypes.get_errno()
    with as_failures():
        raise OSError(code, os.strerror(code))


class TcpKind(BackendKind):
    name = "tcp"
    # At 4 MiB, the work between two batches costs a tenth of the speed. A revoke does not wait for
    # a batch that takes long: it interrupts it.
    batch_bytes = 16 << 20

    def detail(self, memory: LocalMemory) -> str | None:
        return "" if memory.device is None else None

    def make(self, memory: LocalMemory, link: SocketConnection, *, owner: bool) -> Backend:
        return TcpBackend(link)
