"""OFD byte-range locks. An open file description owns them. The kernel frees them when its last
descriptor is closed, however the process dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

# A fork inherits the locks. So open the file after forking, and never fork a process that holds a
# lock and lives on. (Every open here sets O_CLOEXEC, which covers exec and subprocess.)
_F_OFD_SETLK = 37
# Keeps the GIL. The call never blocks and takes half a microsecond. To release the GIL around it
# would cost up to a switch interval beside a busy Python thread.
_fcntl = ctypes.PyDLL(None, use_errno=True).fcntl


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
    return _set(fd, fcntl.F_WRLCK, start, length)


def try_shared(fd: int, start: int, length: int) -> bool:
    """Take the range together with other sharers. False: held exclusively. Raises OSError."""
    return _set(fd, fcntl.F_RDLCK, start, length)


def unlock(fd: int, start: int, length: int) -> None:
    """Let go of the range. Raises OSError."""
    _set(fd, fcntl.F_UNLCK, start, length)


def _set(fd: int, kind: int, start: int, length: int) -> bool:
    wanted = ctypes.byref(_Flock(kind, os.SEEK_SET, start, length, 0))
    while _fcntl(fd, _F_OFD_SETLK, wanted):
        code = ctypes.get_errno()
        if code in (errno.EAGAIN, errno.EACCES):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True
