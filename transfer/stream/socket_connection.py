"""One TCP connection under the stream protocol: frames, marks, seals, timeouts. Blocking.

Owned by one thread, which alone uses and closes it; `interrupt` may come from any other. Every call
is bounded: `stall_s` without the peer ends it with TransferFailed. The kernel ends a connection
whose host is gone within `DEAD_AFTER_S`, so an idle one waits without a limit of its own.

Beside a busy engine thread each return from a call that gave up the GIL may cost half a
millisecond. So what is small and usually ready (marks) is tried once without giving it up.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import threading
import time

from pullfill.errors import BadMessage, TransferFailed
from pullfill.net.handshake import Seal

STALL_S = 30.0
"""How long an operation waits for the other end without progress."""
DEAD_AFTER_S = 15
"""A host that answers no TCP keepalive for this long is gone."""
_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@qq")
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_AGAIN = (errno.EAGAIN, errno.EINTR)

_quick = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL
_quick.recv.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_quick.recv.restype = ctypes.c_ssize_t


class SocketConnection:
    """A stream contract `Link`. Owns `sock`."""

    def __init__(self, sock: socket.socket, stall_s: float = STALL_S) -> None:
        self._sock = sock
        self._mutex = threading.Lock()
        self._in: Seal | None = None
        self._out: Seal | None = None
        self._byte = ctypes.create_string_buffer(1)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_AFTER_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        # Keep-alives rest while sent bytes wait for their acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
        self.stall_s = 0.0
        self.set_stall(stall_s)

    def set_stall(self, stall_s: float) -> None:
        """From now on a call may go without progress for so long. Lifts `limit`."""
        self.stall_s = stall_s
        self._until: float | None = None
        self._set_timeout(stall_s)

    def limit(self, seconds: float) -> None:
        """All that is received from now on must be there in time, however steadily it drips."""
        self._until = time.monotonic() + seconds

    def _set_timeout(self, stall_s: float) -> None:
        spec = _TIMEVAL.pack(int(stall_s), int(stall_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, spec)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, spec)

    def seal(self, *, incoming: bytes, outgoing: bytes) -> None:
        """From the next frame on, in both directions."""
        self._in, self._out = Seal(incoming), Seal(outgoing)

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    # ------------------------------------------------------------------ frames

    def send(self, body: bytes) -> None:
        """See Link."""
        if self._out is not None:
            body = self._out.add(body)
        with _as_failures():
            self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, limit: int = 1 << 20) -> bytes:
        """See Link."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > limit:
            raise BadMessage(f"a frame of {length} bytes (at most {limit})")
        body = bytes(self._exactly(length))
        return body if self._in is None else self._in.remove(body)

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, got = memoryview(data), 0
        with _as_failures():
            while got < nbytes:
                if self._until is not None:
                    left = self._until - time.monotonic()
                    if left <= 0:
                        raise TransferFailed("the opening takes too long")
                    self._set_timeout(max(0.001, min(left, self.stall_s)))  # 0: no limit
                more = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
                if not more:
                    raise TransferFailed("the connection is closed")
                got += more
        return data

    # ------------------------------------------------------------------ marks

    def mark(self, mark: bytes) -> None:
        """Send one byte."""
        with _as_failures():
            self._sock.sendall(mark)

    def take_mark(self) -> bytes:
        """The next byte from the peer."""
        if (ready := self._peek(0)) is not None:
            if not ready:
                raise TransferFailed("the connection is closed")
            return ready
        return bytes(self._exactly(1))

    def input_waits(self) -> bool:
        """Whether the peer said something (or left) that was not read yet."""
        return self._peek(socket.MSG_PEEK) is not None

    def wait_for_input(self) -> bool:
        """Wait without a limit for the peer to say something. False: it left, or `interrupt`."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll()
        return bool(self._peek(socket.MSG_PEEK))

    def _peek(self, flags: int) -> bytes | None:
        """One byte, b"" when the peer left, None when there is nothing yet."""
        got = _quick.recv(self.fd, self._byte, 1, flags | _NOW)
        if got < 0:
            code = ctypes.get_errno()
            return None if code in _AGAIN else b""
        return self._byte.raw if got else b""

    # ------------------------------------------------------------------ the end

    def interrupt(self, how: int = socket.SHUT_RDWR) -> None:
        """Any thread, any time: calls under way end soon. Received bytes may still be read."""
        with self._mutex, contextlib.suppress(OSError):
            self._sock.shutdown(how)

    def linger(self, seconds: float = 1.0) -> None:
        """Say no more, and throw away what the peer still says: closed at once with bytes unread,
        the kernel would reset the connection, and our last words with it. Never raises."""
        give_up = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self.set_stall(seconds)
            scratch = bytearray(64 << 10)
            while time.monotonic() < give_up and self._sock.recv_into(scratch):
                pass

    def close(self) -> None:
        """Idempotent. No call is under way."""
        with self._mutex:
            self._sock.close()


@contextlib.contextmanager
def _as_failures():  # type: ignore[no-untyped-def]
    try:
        yield
    except BlockingIOError:
        raise TransferFailed("the peer makes no progress") from None
    except OSError as exc:
        raise TransferFailed(f"the connection broke: {exc.strerror or exc}") from exc


def reason(code: int) -> str:
    """For backends that call the kernel themselves: what `errno` means for people."""
    if code == errno.EAGAIN:
        return "the peer makes no progress"
    return f"the connection broke: {os.strerror(code)}"
