"""NATS' text protocol: what is written, what is read, and what a server may not do to us."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.queue import client as clients
from pullfill.queue.client import AuthRefused, Client, Closed, NatsError, TooLarge
from pullfill.queue.protocol import STATUS, Message, Parser, ProtocolError, hpub, pub, read_headers

Read = list[tuple[Any, ...]]


def flat(events: Any) -> Read:
    return [
        (e.subject, e.subscription, e.reply, e.data, e.headers) if isinstance(e, Message) else e
        for e in events
    ]


STREAM = (
    b'INFO {"a": 1}\r\nPING\r\n+OK\r\nMSG a.b 1 5\r\nhello\r\nMSG a.b 12 _INBOX.x 0\r\n\r\n'
    b"HMSG a 2 r.1 12 12\r\nNATS/1.0\r\n\r\n\r\n"
    b"HMSG in 7 16 16\r\nNATS/1.0 503\r\n\r\n\r\n-ERR 'Permissions Violation'\r\npong\r\n"
)
EXPECTED: Read = [
    (b"INFO", b'{"a": 1}'),
    (b"PING", b""),
    ("a.b", 1, "", b"hello", {}),
    ("a.b", 12, "_INBOX.x", b"", {}),
    ("a", 2, "r.1", b"", {}),
    ("in", 7, "", b"", {STATUS: "503"}),
    (b"-ERR", b"'Permissions Violation'"),
    (b"PONG", b""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_what_a_server_says_is_read_however_it_is_cut(size: int) -> None:
    parser, read = Parser(), list[Any]()
    for begin in range(0, len(STREAM), size):
        read += parser.feed(STREAM[begin : begin + size])
    assert flat(read) == EXPECTED


def as_delivered(command: bytes) -> bytes:
    """A PUB of ours as the server would deliver it."""
    line, _, rest = command.partition(b"\r\n")
    word, subject, *fields = line.split()
    numbers = 2 if word == b"HPUB" else 1
    fields = [subject, b"5", *fields]
    assert len(fields) in (2 + numbers, 3 + numbers)
    return word.replace(b"PUB", b"MSG") + b" " + b" ".join(fields) + b"\r\n" + rest


WORD = st.text("abcXYZ.*>$_-09", min_size=1, max_size=20)


@given(WORD, st.just("") | WORD, st.binary(max_size=200), st.none() | st.dictionaries(WORD, WORD))
def test_what_is_published_comes_out_the_same(
    subject: str, reply: str, payload: bytes, headers: dict[str, str] | None
) -> None:
    command = (
        pub(subject, reply, payload) if headers is None else hpub(subject, reply, headers, payload)
    )
    assert flat(Parser().feed(as_delivered(command))) == [
        (subject, 5, reply, payload, headers or {})
    ]


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0\r\n", "a\t", "a\n"])
def test_no_subject_breaks_out_of_its_line(subject: str) -> None:
    for write in (
        lambda: pub(subject, "", b""),
        lambda: pub("a", subject or " ", b""),
        lambda: hpub(subject, "", {}, b""),
    ):
        with pytest.raises(ValueError, match="subject"):
            write()


@pytest.mark.parametrize("text", ["a\r\nb: c", "a\nb", "a\r", "\r\n"])
def test_no_header_breaks_out_of_its_line(text: str) -> None:
    for headers in ({"name": text}, {text: "value"}):
        with pytest.raises(ValueError, match="header"):
            hpub("a", "", headers, b"")


def test_headers() -> None:
    assert read_headers(b"NATS/1.0 404 No Messages\r\nA: b: c\r\nno colon\r\nD:\r\n\r\n") == {
        STATUS: "404", "A": "b: c", "D": "",
    }  # fmt: skip
    assert read_headers(b"NATS/1.0\r\nA: \xff\r\n\r\n") == {"A": "\ufffd"}


@pytest.mark.parametrize(
    "strange",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"MSG a 1\r\n",
        b"MSG a x 5\r\n",
        b"MSG a 1 -5\r\n",
        b"MSG a 1 999999999999\r\n",
        b"MSG a 1 r 5 6 7\r\n",
        b"HMSG a 1 9 5\r\n",
        b"MSG \xff 1 5\r\n",
        b"MSG a 1 1\r\nhello\r\n",
        b"x" * (2 << 20),
    ],
)
def test_what_is_no_nats_is_refused(strange: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Parser().feed(strange))


@given(st.binary(max_size=300), st.integers(1, 50))
def test_garbage_is_refused_or_waits_for_more(data: bytes, size: int) -> None:
    parser = Parser()
    try:
        for begin in range(0, len(data), size):
            list(parser.feed(data[begin : begin + size]))
    except ProtocolError:
        pass


# --------------------------------------------------------------------------- a client


INFO = {"max_payload": 1000, "headers": True}


class Server:
    """Says what a test wants, and remembers the lines that it hears."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.lines: list[str] = []
        self.answers_pings = True
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def writer(self) -> asyncio.StreamWriter:
        return self.writers[-1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(b"INFO " + json.dumps(self.info).encode() + b"\r\n")
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self.lines.append(line.decode().strip())
                if line == b"PING\r\n" and self.answers_pings:
                    writer.write(b"PONG\r\n")
        writer.close()

    def say(self, data: bytes) -> None:
        self.writer.write(data)


@asynccontextmanager
async def serving(**info: Any) -> AsyncIterator[tuple[Server, str]]:
    server = Server(INFO | info)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield server, f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for writer in server.writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


async def connected(url: str, **more: Any) -> Client:
    return await Client.connect([url], name="test", timeout_s=5, **more)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - there is nothing to subscribe to
            await asyncio.sleep(0.001)


async def test_what_is_said_in_one_turn_leaves_in_one_piece_and_a_question_at_once() -> None:
    async with serving() as (server, url):
        client = await connected(url)
        pieces: list[bytes] = []
        assert client._transport is not None
        client._transport.write = pieces.append  # type: ignore[method-assign, assignment]
        client.publish("a", b"1")
        client.publish("b", b"2")
        assert pieces == []
        await asyncio.sleep(0)
        assert pieces == [pub("a", "", b"1") + pub("b", "", b"2")]
        client.publish("a", b"1")
        client.publish("b", b"2", now=True)
        assert pieces[1:] == [pub("a", "", b"1") + pub("b", "", b"2")]
        client.abort()
        assert server.lines


async def test_a_message_is_handled_within_the_read_that_brought_it() -> None:
    """What is published meanwhile leaves at its end. One that fails harms no other."""
    async with serving() as (_, url):
        client, seen = await connected(url), list[Message]()

        def handle(message: Message) -> None:
            seen.append(message)
            client.publish("answer", message.data, now=True)
            if message.data == b"1":
                raise RuntimeError("bad luck")

        subscription = client.subscribe("jobs", handle)
        await client.flush()
        pieces: list[bytes] = []
        assert client._transport is not None
        client._transport.write = pieces.append  # type: ignore[method-assign, assignment]
        client.data_received(b"MSG jobs 1 1\r\n1\r\nMSG jobs 1 1\r\n2\r\nMSG x 9 1\r\n3\r\n")
        assert [message.data for message in seen] == [b"1", b"2"]
        assert pieces == [pub("answer", "", b"1") + pub("answer", "", b"2")]
        subscription.unsubscribe()
        client.data_received(b"MSG jobs 1 1\r\n4\r\n")
        assert len(seen) == 2
        client.abort()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"-ERR 'Authorization Violation'\r\n", AuthRefused),
        (b"-ERR 'Stale Connection'\r\n", NatsError),
        (b"nonsense\r\n", NatsError),
        (b'INFO {"max_payload": "x"}\r\n', NatsError),
        (b"", NatsError),
    ],
    ids=["login", "stale", "nonsense", "info", "end"],
)
async def test_the_end_is_told_once_and_ends_every_wait(said: bytes, kind: type[Exception]) -> None:
    async with serving() as (server, url):
        ends: list[NatsError] = []
        client = await connected(url, on_end=ends.append)
        server.answers_pings = False
        waiting = asyncio.create_task(client.flush())
        await until(lambda: server.lines[-1] == "PING" and len(server.lines) > 2)
        if said:
            server.say(said)
        else:
            server.writer.close()
        with pytest.raises(kind):
            await waiting
        await asyncio.sleep(0.01)
        assert [type(end) for end in ends] == [kind]
        assert client.is_closed
        for use in (lambda: client.publish("a", b""), lambda: client.subscribe("a", print)):
            with pytest.raises(Closed):
                use()
        with pytest.raises(Closed):
            await client.flush()
        await client.close()
        assert len(ends) == 1


async def test_a_right_that_is_missing_ends_nothing() -> None:
    async with serving() as (server, url):
        said: list[NatsError] = []
        client = await connected(url, on_error=said.append)
        server.say(b"-ERR 'Permissions Violation for Publish to \"a\"'\r\nINFO {}\r\n")
        await client.flush()
        assert "Permissions" in str(said)
        assert client.is_connected
        assert client.max_payload == 1000
        await client.close()


async def test_too_much_is_refused_before_it_is_sent() -> None:
    async with serving() as (server, url):
        client = await connected(url)
        with pytest.raises(TooLarge):
            client.publish("a", bytes(1001))
        client.publish("a", bytes(1000))
        await client.flush()
        server.say(b'INFO {"max_payload": 5}\r\n')
        await client.flush()
        with pytest.raises(TooLarge):
            client.publish("a", bytes(6))
        await client.close()


async def test_a_server_that_answers_no_ping_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PING_S", 0.02)
    async with serving() as (server, url):
        ends: list[NatsError] = []
        client = await connected(url, on_end=ends.append)
        await asyncio.sleep(0.2)
        assert client.is_connected
        server.answers_pings = False
        await until(lambda: ends)
        assert "PING" in str(ends[0])


async def test_the_server_asks_too() -> None:
    async with serving() as (server, url):
        client = await connected(url)
        server.say(b"PING\r\n")
        await until(lambda: "PONG" in server.lines)
        await client.close()


@pytest.mark.parametrize(
    ("login", "told"),
    [
        ({}, {"user": "u", "pass": "p"}),
        ({"user": "x", "password": "y"}, {"user": "x", "pass": "y"}),
        ({"token": "t"}, {"auth_token": "t"}),
        (
            {"user_jwt_cb": lambda: bytearray(b"j"), "signature_cb": lambda n: f"s{n}".encode()},
            {"jwt": "j", "sig": "sN"},
        ),
    ],
    ids=["url", "user", "token", "creds"],
)
async def test_logins(login: dict[str, Any], told: dict[str, str]) -> None:
    async with serving(auth_required=True, nonce="N") as (server, url):
        client = await connected(url.replace("//", "//u:p@"), **login)
        connect = json.loads(server.lines[0].removeprefix("CONNECT "))
        names = ("user", "pass", "auth_token", "jwt", "sig")
        assert {name: connect[name] for name in names if name in connect} == told
        await client.close()


async def test_no_login_is_told_to_who_wants_none() -> None:
    async with serving() as (server, url):
        client = await connected(url, user="x", password="secret")
        assert "secret" not in server.lines[0]
        await client.close()


async def test_whoever_wants_tls_gets_no_plain_connection() -> None:
    async with serving() as (server, url):
        with pytest.raises(NatsError, match="TLS"):
            await connected(url, tls=object(), user="x", password="secret")
        assert server.lines == []


async def test_whichever_server_answers_is_taken() -> None:
    async with serving() as (_, url):
        dead = "nats://127.0.0.1:1"
        for urls in ([dead, url], [url, dead]):
            client = await Client.connect(urls, name="t", timeout_s=5, dont_randomize=True)
            assert client.is_connected
            await client.close()
        with pytest.raises(OSError, match="127"):
            await Client.connect([dead], name="t", timeout_s=5)
