"""OFD byte-range locks. An open file description owns them. The kernel frees them when its last
descriptor is closed, however the process dies.

A fork inherits them. So open the file after forking, and never fork a process that holds a lock and
lives on. (Every open here sets O_CLOEXEC, which covers exec and subprocess.)

The calls keep the GIL: they never block and take half a microsecond. To release the GIL around them
would cost up to a switch interval beside a busy Python thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from functools import lru_cache
from typing import Any, TypeAlias

_F_OFD_SETLK = 37
_fcntl = ctypes.PyDLL(None, use_errno=True).fcntl

Call: TypeAlias = tuple[int, int, Any]
# `call(*ready)` does what `shared` made ready. Returns 0 when it is done. When not, nothing has
# changed; `try_shared` and `unlock` say why. (To keep errno would cost a tenth more.)
call = ctypes.PyDLL(None).fcntl


class _Flock(ctypes.Structure):
    _fields_ = (
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int),
    )


def try_exclusive(fd: int, start: int, length: int) -> bool:
    """Take the range alone. False: someone else holds part of it. Raises OSError on anything
    else (bad descriptor, no lock memory)."""
    lock = _flock(fcntl.F_WRLCK, start, length)
    return _fcntl(fd, _F_OFD_SETLK, lock) == 0 or _again(fd, lock)


def try_shared(fd: int, start: int, length: int) -> bool:
    """Take the range together with other sharers. False: held exclusively."""
    lock = _flock(fcntl.F_RDLCK, start, length)
    return _fcntl(fd, _F_OFD_SETLK, lock) == 0 or _again(fd, lock)


def unlock(fd: int, start: int, length: int) -> None:
    """Let go of the range. Raises OSError."""
    lock = _flock(fcntl.F_UNLCK, start, length)
    if _fcntl(fd, _F_OFD_SETLK, lock):
        _again(fd, lock)


def shared(fd: int, start: int, length: int) -> tuple[Call, Call]:
    """`try_shared` and `unlock` of one range, ready for `call`: for callers that repeat them."""
    take, give = _flock(fcntl.F_RDLCK, start, length), _flock(fcntl.F_UNLCK, start, length)
    return (fd, _F_OFD_SETLK, take), (fd, _F_OFD_SETLK, give)


@lru_cache(maxsize=4096)
def _flock(kind: int, start: int, length: int) -> Any:
    """A pointer to the kernel's struct, which the kernel only reads."""
    # Cached: to make one takes twice as long as the call.
    return ctypes.byref(_Flock(kind, os.SEEK_SET, start, length, 0))


def _again(fd: int, lock: Any) -> bool:
    """After the call failed: repeat it if a signal ended it, else find out why it failed."""
    while (code := ctypes.get_errno()) == errno.EINTR:
        if _fcntl(fd, _F_OFD_SETLK, lock) == 0:
            return True
    if code in (errno.EAGAIN, errno.EACCES):
        return False
    raise OSError(code, os.strerror(code))
