"""Minimal proxies for the rivals: round robin over servers, and vLLM's way to use NIXL.

A request is read whole, sent to a server, and what comes back is passed on as it comes, byte for
byte, until the server closes: one connection for each request on both sides, no parsing of the
stream, as little CPU as asyncio allows. A client that goes away ends its request at the server.

    python -m benchmarks.serving.proxies round-robin --port 9000 --server URL --server URL
    python -m benchmarks.serving.proxies nixl --port 9000 --prefill URL --decode URL
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import uvloop

CHUNK = 1 << 16
HEAD_LIMIT = 1 << 16
GENERATES = ("/v1/completions", "/v1/chat/completions")

Address = tuple[str, int]


class ProxyError(Exception):
    """No server could be asked, or what came from it or from the client is no HTTP."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sent."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def wire(self) -> bytes:
        """The request as a server gets it: to be answered on a connection of its own."""
        kept = {k: v for k, v in self.headers.items() if k not in ("connection", "content-length")}
        kept |= {"connection": "close", "content-length": str(len(self.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
        return f"{self.method} {self.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + self.body


@dataclass(slots=True)
class Upstream:
    """An open connection on which a request was sent."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Policy(Protocol):
    """Where requests go."""

    async def send(self, request: Request) -> Upstream | bytes:
        """Send it to a server that will answer the client; bytes: the whole answer already.

        Raises ProxyError, or OSError when the server is gone.
        """


async def ask(address: Address, request: Request) -> Upstream:
    """Send a request. Raises OSError when the server is not there."""
    upstream = Upstream(*await asyncio.open_connection(*address, limit=CHUNK))
    upstream.writer.write(request.wire())
    return upstream


class RoundRobin:
    """Each request to the next server; one that cannot be reached is passed over."""

    def __init__(self, servers: Sequence[Address]) -> None:
        self._servers = list(servers)
        self._next = itertools.cycle(range(len(self._servers)))

    async def send(self, request: Request) -> Upstream:
        first = next(self._next) if request.method == "POST" else 0
        for offset in range(len(self._servers)):
            with suppress(OSError):
                return await ask(self._servers[(first + offset) % len(self._servers)], request)
        raise ProxyError("no server answers")


class Nixl:
    """Prefill first, with one token to generate; the server that did it says where the KV is, and
    the decode server gets that along with the request. As in vLLM's own example of such a proxy.

    direct_below: prompts of fewer tokens go to the decode server alone; 0: none.
    """

    def __init__(self, prefill: Address, decode: Address, direct_below: int = 0) -> None:
        self._prefill = prefill
        self._decode = decode
        self._direct_below = direct_below

    async def send(self, request: Request) -> Upstream | bytes:
        if request.method != "POST" or request.path not in GENERATES:
            return await ask(self._decode, request)
        try:
            body = msgspec.json.decode(request.body, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise ProxyError(f"the request is no JSON object: {exc}") from exc
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) < self._direct_below:
            return await ask(self._decode, request)
        headers = {"x-request-id": str(uuid.uuid4()), "content-type": "application/json"}
        first = Request("POST", request.path, encode(prefill_body(body)), headers)
        upstream = await ask(self._prefill, first)
        try:
            answer = await upstream.reader.read(-1)
        finally:
            upstream.writer.close()
        status, payload = split_answer(answer)
        if status != HTTPStatus.OK:
            return answer
        params = msgspec.json.decode(payload, type=dict[str, Any]).get("kv_transfer_params")
        if params:
            body["kv_transfer_params"] = params
        return await ask(self._decode, Request("POST", request.path, encode(body), headers))


def encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, to be prefilled only and its KV kept for a decode server."""
    dropped = ("stream_options", "min_tokens", "min_completion_tokens")
    first = {key: value for key, value in body.items() if key not in dropped}
    first |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    unknown = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**first, "kv_transfer_params": params | dict.fromkeys(unknown)}


def split_answer(raw: bytes) -> tuple[int, bytes]:
    """(status, body) of an answer with a length. Raises ProxyError when it is cut or no HTTP."""
    head, gap, body = raw.partition(b"\r\n\r\n")
    fields = head.split(b"\r\n")
    try:
        status = int(fields[0].split()[1])
        lengths = [int(f.split(b":")[1]) for f in fields if f.lower().startswith(b"content-length")]
    except (IndexError, ValueError):
        raise ProxyError(f"not an HTTP answer: {raw[:60]!r}") from None
    if not gap or not lengths or len(body) != lengths[0]:
        raise ProxyError("the prefill server's answer was cut")
    return status, body


async def read_request(reader: asyncio.StreamReader) -> Request:
    """One request with its body. Raises ProxyError, IncompleteReadError when the client went."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise ProxyError("the head of the request is too long") from None
    first, *lines = head[:-4].split("\r\n")
    try:
        method, path, _version = first.split(" ")
        headers = {
            name.strip().lower(): value.strip()
            for name, value in (line.split(":", 1) for line in lines)
        }
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise ProxyError(f"not an HTTP request: {first[:60]!r}") from None
    if "transfer-encoding" in headers:
        raise ProxyError("send a content-length: chunked requests are not taken")
    return Request(method, path, await reader.readexactly(length), headers)


def refusal(status: HTTPStatus, why: str) -> bytes:
    body = encode({"error": {"message": why, "code": int(status)}})
    head = f"HTTP/1.1 {int(status)} {status.phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


class Proxy:
    """Serves one policy. Each connection carries one request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Listen. The caller closes it."""
        return await asyncio.start_server(self._client, host, port, limit=HEAD_LIMIT)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering: asyncio.Task[None] | None = None
        gone: asyncio.Task[bytes] | None = None
        try:
            request = await read_request(reader)
            answering = asyncio.create_task(self._answer(request, writer))
            gone = asyncio.create_task(reader.read(1))
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
        except ProxyError as exc:
            writer.write(refusal(HTTPStatus.BAD_REQUEST, str(exc)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for task in (answering, gone):
                if task is not None:
                    task.cancel()
                    with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, OSError):
                        await task
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        try:
            sent = await self._policy.send(request)
        except (ProxyError, OSError) as exc:
            writer.write(refusal(HTTPStatus.BAD_GATEWAY, str(exc)))
            return
        if isinstance(sent, bytes):
            writer.write(sent.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            return
        try:
            # Servers that were asked to close need not say so to whom they do not know.
            status = await sent.reader.readuntil(b"\r\n")
            writer.write(status + b"connection: close\r\n")
            while data := await sent.reader.read(CHUNK):
                writer.write(data)
                await writer.drain()
        finally:
            sent.writer.close()


def address(url: str) -> Address:
    """Host and port of a URL. Raises ValueError."""
    parts = urlsplit(url)
    if not parts.hostname or not parts.port:
        raise ValueError(f"no host and port in {url!r}")
    return parts.hostname, parts.port


async def _serve(policy: Policy, port: int) -> None:
    server = await Proxy(policy).start("127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.proxies")
    kinds = parser.add_subparsers(dest="kind", required=True)
    robin = kinds.add_parser("round-robin")
    robin.add_argument("--server", type=address, action="append", required=True)
    nixl = kinds.add_parser("nixl")
    nixl.add_argument("--prefill", type=address, required=True)
    nixl.add_argument("--decode", type=address, required=True)
    nixl.add_argument("--direct-below", type=int, default=0, metavar="TOKENS")
    for kind in (robin, nixl):
        kind.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    policy: Policy
    if options.kind == "nixl":
        policy = Nixl(options.prefill, options.decode, options.direct_below)
    else:
        policy = RoundRobin(options.server)
    uvloop.run(_serve(policy, options.port))


if __name__ == "__main__":
    main()
