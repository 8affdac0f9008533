"""The text protocol between a NATS client and its server: what is written, and how it is read.

https://docs.nats.io/reference/reference-protocols/nats-protocol has it whole. Nothing here waits or
owns anything.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_LINE = 1 << 20
"""Bytes of a control line. INFO names all members of a cluster; the others are short."""
MAX_MESSAGE = 64 << 20
"""The most that a server can be configured to carry."""
STATUS = "Status"
"""Where `Message.headers` has the number of an answer that is only a status."""
_END = b"\r\n"
_HEAD = b"NATS/1.0"


class ProtocolError(Exception):
    """The server said something that is no NATS protocol. The connection is of no use after it."""


class Message:
    """One message. subscription: the number of ours that it is for."""

    __slots__ = ("_head", "_headers", "data", "reply", "subject", "subscription")

    def __init__(
        self, subject: str, subscription: int, reply: str, data: bytes, head: bytes = b""
    ) -> None:
        self.subject = subject
        self.subscription = subscription
        self.reply = reply
        self.data = data
        self._head = head
        self._headers: dict[str, str] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Empty if it has none. A status stands as `STATUS`."""
        if self._headers is None:
            self._headers = read_headers(self._head) if self._head else {}
        return self._headers


def read_headers(head: bytes) -> dict[str, str]:
    """`NATS/1.0 [status [text]]`, then a line of `name: value` each. What is none is left out."""
    first, *lines = head.decode("utf-8", "replace").split("\r\n")
    headers = {}
    if status := first[len(_HEAD) :].strip():
        headers[STATUS] = status.partition(" ")[0]
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def pub(subject: str, reply: str, payload: bytes) -> bytes:
    """Raises ValueError if a subject would break the line."""
    return b"PUB %s%d\r\n%s\r\n" % (_subjects(subject, reply), len(payload), payload)


def hpub(subject: str, reply: str, headers: dict[str, str], payload: bytes) -> bytes:
    """With headers. Raises ValueError if a subject or a header would break its line."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not text.count("\r") == text.count("\n") == len(headers):
        raise ValueError(f"a header of more than one line: {text!r}")
    head = f"NATS/1.0\r\n{text}\r\n".encode()
    return b"HPUB %s%d %d\r\n%s%s\r\n" % (
        _subjects(subject, reply), len(head), len(head) + len(payload), head, payload,
    )  # fmt: skip


def _subjects(subject: str, reply: str) -> bytes:
    words = [subject, reply] if reply else [subject]
    text = " ".join(words)
    if text.split() != words:
        raise ValueError(f"no subject of NATS: {subject!r}, {reply!r}")
    return text.encode() + b" "


Command = tuple[bytes, bytes]


class Parser:
    """Cuts what a server sends into messages and commands: PING, PONG, INFO, -ERR with the rest of
    their line; +OK is left out."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0
        self._wanted = 0

    def feed(self, data: bytes) -> Iterator[Message | Command]:
        """What is complete with these bytes. Take all of it. Raises ProtocolError."""
        if self._size:
            self._rest.append(data)
            self._size += len(data)
            if self._size < self._wanted:
                return  # a large message: it is joined once
            data = b"".join(self._rest)
        at, size = 0, len(data)
        self._wanted = 0
        while at < size:
            end = data.find(_END, at)
            if end < 0:
                if size - at > MAX_LINE:
                    raise ProtocolError("the server sends a line without an end")
                break
            word, _, rest = data[at:end].partition(b" ")
            word = word.upper()
            if word in (b"MSG", b"HMSG"):
                message, after = self._message(data, end + 2, word, rest)
                if message is None:
                    self._wanted = after - at
                    break
                at = after
                yield message
            elif word in (b"PING", b"PONG", b"INFO", b"-ERR"):
                at = end + 2
                yield word, rest
            elif word == b"+OK":
                at = end + 2
            else:
                raise ProtocolError(f"the server says {data[at : min(end, at + 100)]!r}")
        self._rest = [data[at:]] if at < size else []
        self._size = size - at

    def _message(
        self, data: bytes, begin: int, word: bytes, line: bytes
    ) -> tuple[Message | None, int]:
        """The message, None while it is not there, and where it ends."""
        try:
            fields = line.decode().split()
            subject, number = fields[0], int(fields[1])
            headed = word == b"HMSG"
            least = 4 if headed else 3
            reply = fields[2] if len(fields) > least else ""
            size = int(fields[-1])
            head = int(fields[-2]) if headed else 0
            if not (least <= len(fields) <= least + 1 and 0 <= head <= size <= MAX_MESSAGE):
                raise ValueError("sizes")
        except (ValueError, IndexError) as exc:
            raise ProtocolError(f"the server sends an odd message: {line[:100]!r}") from exc
        end = begin + size
        if len(data) < end + 2:
            return None, end + 2
        if data[end : end + 2] != _END:
            raise ProtocolError("a message of the server is longer than it says")
        body = begin + head
        return Message(subject, number, reply, data[body:end], data[begin:body]), end + 2
