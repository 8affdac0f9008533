"""One connection of the control channel, plain or sealed with the cluster key.

Life: made by the loop for a new connection; `accept` (decode worker) or `introduce` (prefill
worker) opens it, with `read` and `write`. From `hear` on each message is handled in the callback
that received its bytes: a task that reads would cost two more turns of the loop for each message.
`close` or `abort` ends it; `ended` tells why. Belongs to one loop; owns the transport.

With a cluster key each end proves to the other that it holds the key, bound to two fresh nonces and
to its role, before anything else is said. From then on every frame carries a 16-byte seal: a keyed
hash over its number and its body, with a key per direction that both nonces go into. So nobody on
the path can forge, change, repeat, drop in the middle or reflect a claim or a commit. Messages are
not encrypted: they hold ids and block numbers, but no prompt and no KV.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from pullfill.errors import AuthFailed, BadMessage, ConfigError, PeerUnavailable
from pullfill.net import frames
from pullfill.net.security import ClusterKey
from pullfill.wire import AuthChallenge, AuthHello, AuthProof, Goodbye, Hello, decode, encode
from pullfill.wire.codec import decoder

T = TypeVar("T")

FIRST_FRAME = 64 << 10
"""Bytes of a frame from somebody who has not said who it is."""
HELLO_FRAME = 2 << 20
"""Bytes of a frame with a `Hello`: it describes the memory of each rank, in some 800 bytes."""
_AHEAD = HELLO_FRAME + (64 << 10)
"""Received bytes that are buffered at most before `read` or `hear` takes them."""
_AT_ONCE = 64 << 10
"""Bytes that do not wait for the end of a turn of the loop."""


class Seal:
    """One direction's key and count of frames."""

    __slots__ = ("_key", "_number")
    BYTES = 16

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def of_next(self, body: bytes) -> bytes:
        hashed = hashlib.blake2b(
            self._number.to_bytes(8, "little"), key=self._key, digest_size=self.BYTES
        )
        self._number += 1
        hashed.update(body)
        return hashed.digest()


class Channel(asyncio.Protocol):
    """See the module.

    opened: called once the channel is connected.
    peer: the other end's address, for logs."""

    def __init__(self, opened: Callable[[Channel], object] = lambda _: None) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened = opened
        self._transport: asyncio.Transport
        self._in: Seal | None = None
        self._out: Seal | None = None
        self._arrived = frames.Cutter()
        self._paused = False
        self._more: asyncio.Future[None] | None = None
        self._decode: Callable[[bytes], Any]
        self._handler: Callable[[Any], object] | None = None
        self._handling = False
        self._waiting: list[bytes] = []
        self._size = 0
        self._why: Exception | None = None
        self._ended = asyncio.Event()
        self.peer = "?"

    # ------------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        frames.tune(transport)
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        if self._why is not None:
            return
        self._arrived.feed(data)
        if self._handler is not None:
            self._handle()
            return
        if self._arrived.size > _AHEAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """The transport closes itself then."""
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._why = self._why or EOFError(str(exc or ""))
        self._ended.set()
        self._wake()

    # ------------------------------------------------------------------ in

    async def read(self, kind: type[T], limit: int = frames.MAX_FRAME) -> T:
        """Return the next message. One caller at a time, and only before `hear`.

        Raises EOFError if the peer has closed, AuthFailed on a wrong seal, BadMessage on a message
        that cannot be decoded. Close the connection after any of them."""
        while (body := self._arrived.cut(limit)) is None:
            if self._why is not None:
                raise self._why
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._more = self._loop.create_future()
            await self._more
        return decode(self._unsealed(body), kind)

    def hear(self, kind: Any, handler: Callable[[Any], object]) -> None:
        """Call `handler` with each message that arrives from now on.

        An error of the handler, or one that `read` would raise, closes the connection. `ended` then
        raises it."""
        self._decode, self._handler = decoder(kind), handler
        if self._paused:
            self._transport.resume_reading()
        self._handle()

    async def ended(self) -> None:
        """Wait until the connection has ended, then raise the reason.

        That is an error as of `read`, or the one that the handler raised."""
        await self._ended.wait()
        assert self._why is not None
        raise self._why

    def _handle(self) -> None:
        """Handle all messages that have arrived. The replies are sent in one piece."""
        assert self._handler is not None
        self._handling = True
        try:
            while (body := self._arrived.cut(frames.MAX_FRAME)) is not None and self._why is None:
                self._handler(self._decode(self._unsealed(body)))
        except Exception as exc:
            self._why = self._why or exc
            self.close()
        finally:
            self._handling = False
        if self._waiting:
            self._send()

    def _unsealed(self, body: bytes) -> bytes:
        if self._in is None:
            return body
        seal, body = body[: Seal.BYTES], body[Seal.BYTES :]
        if not hmac.compare_digest(seal, self._in.of_next(body)):
            raise AuthFailed(f"a frame from {self.peer} has a wrong seal: forged or replayed")
        return body

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    # ------------------------------------------------------------------ out

    def write(self, message: msgspec.Struct, *, now: bool = False) -> None:
        """Queue one message for sending. Never blocks, and never raises on a broken connection.

        The messages of one turn of the event loop are sent at its end, in one piece.

        now: send at once."""
        body = encode(message)
        if self._out is not None:
            body = self._out.of_next(body) + body
        if not self._waiting and not self._handling and not now:
            self._loop.call_soon(self._send)
        self._waiting.append(body)
        self._size += len(body)
        if now or self._size > _AT_ONCE:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting, self._size = self._waiting, [], 0
        if waiting:
            frames.write_bodies(self._transport, waiting)

    def seal(self, *, incoming: bytes, outgoing: bytes) -> None:
        """From the next frame on, in both directions."""
        self._in, self._out = Seal(incoming), Seal(outgoing)

    def close(self) -> None:
        """Say what is queued, then end."""
        self._send()
        self._transport.close()

    def abort(self) -> None:
        """Close at once. Messages that have arrived but were not handled are dropped."""
        self._why = self._why or EOFError("ended here")
        self._waiting.clear()
        self._transport.abort()


# --------------------------------------------------------------------------- who are you


class Handshake:
    """What both ends compute from the key and the two nonces. purpose: what the connection is for;
    proofs of one are worth nothing for another."""

    def __init__(
        self,
        key: ClusterKey,
        prefill_nonce: bytes,
        decode_nonce: bytes,
        purpose: str = "control channel",
    ) -> None:
        self._key = key.derive(purpose)
        self._nonces = prefill_nonce + decode_nonce

    def _of(self, label: bytes) -> bytes:
        return hashlib.blake2b(label + self._nonces, key=self._key, digest_size=32).digest()

    def proof(self, role: str) -> bytes:
        return self._of(f"proof of {role}:".encode())

    def key_of(self, role: str) -> bytes:
        """Seals what `role` says."""
        return self._of(f"seal of {role}:".encode())


async def accept(channel: Channel, key: ClusterKey | None) -> Hello:
    """The decode worker's end: the peer's Hello, once it has proved that it holds `key`.

    Raises AuthFailed (its text may be told to the peer), EOFError, BadMessage. Bound it in time.
    """
    limit = HELLO_FRAME if key is None else FIRST_FRAME
    first = await channel.read(AuthHello | Hello, limit)  # type: ignore[arg-type]
    if key is None:
        if isinstance(first, Hello):
            return first
        raise AuthFailed("the decode worker has no cluster key: set [cluster] key_file there too")
    if not isinstance(first, AuthHello):
        raise AuthFailed(
            "the prefill worker shows no cluster key: it needs our [cluster] key_file "
            f"({key.fingerprint})"
        )
    nonce = secrets.token_bytes(32)
    shake = Handshake(key, first.nonce, nonce)
    channel.write(AuthChallenge(nonce=nonce, proof=shake.proof("decode")))
    try:
        reply = await channel.read(AuthProof, FIRST_FRAME)
    except EOFError:
        raise AuthFailed(
            f"the prefill worker left when it was shown the proof of our cluster key "
            f"({key.fingerprint}): is its [cluster] key_file another?"
        ) from None
    if not hmac.compare_digest(reply.proof, shake.proof("prefill")):
        raise AuthFailed(
            f"the prefill worker has another cluster key than ours ({key.fingerprint}): check its "
            "[cluster] key_file"
        )
    channel.seal(incoming=shake.key_of("prefill"), outgoing=shake.key_of("decode"))
    return await channel.read(Hello, HELLO_FRAME)


async def introduce(channel: Channel, key: ClusterKey | None, hello: Hello) -> None:
    """The prefill worker's end: prove that we hold `key`, see the same proof, say hello.

    Raises AuthFailed, PeerUnavailable (refused, with the peer's reason), ConfigError (the hello is
    longer than any decode worker takes), EOFError, BadMessage. Never falls back to a plain
    connection.
    """
    if (size := len(encode(hello)) + Seal.BYTES) > HELLO_FRAME:
        raise ConfigError(
            f"our greeting has {size} bytes, for {len(hello.regions)} ranks; at most {HELLO_FRAME} "
            "are taken"
        )
    if key is None:
        channel.write(hello)
        return
    nonce = secrets.token_bytes(32)
    channel.write(AuthHello(nonce=nonce))
    first = await channel.read(AuthChallenge | Goodbye, FIRST_FRAME)  # type: ignore[arg-type]
    if isinstance(first, Goodbye):
        raise PeerUnavailable(f"refused: {first.reason}")
    if not isinstance(first, AuthChallenge):
        raise BadMessage("no challenge")
    shake = Handshake(key, nonce, first.nonce)
    if not hmac.compare_digest(first.proof, shake.proof("decode")):
        raise AuthFailed(
            f"the decode worker has another cluster key than ours ({key.fingerprint}): check "
            "[cluster] key_file on both"
        )
    channel.write(AuthProof(proof=shake.proof("prefill")))
    channel.seal(incoming=shake.key_of("decode"), outgoing=shake.key_of("prefill"))
    channel.write(hello)
