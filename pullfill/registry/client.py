"""One process's connection to etcd, through etcd3-py's `AioClient` and etcd's JSON gateway.

Life: `EtcdClient.connect` once per process → calls → `close`. Belongs to one loop.

Each call has a deadline. It raises RegistryUnavailable if etcd does not answer in time, and
ConfigError if etcd refuses. A write that raised may still have happened.

Of `AioClient` we use `call_rpc(raw=True)`, which adds the token and the prefix of the API, and the
attributes around it. Why not the rest of etcd3-py 0.1.6 stands where we do it ourselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError
from etcd3.aio_client import AioClient
from etcd3.baseclient import sem

from pullfill import redact
from pullfill.backoff import Backoff
from pullfill.clock import SYSTEM_CLOCK
from pullfill.errors import ConfigError, NotNow, RegistryUnavailable
from pullfill.net.channel import tune
from pullfill.net.security import OPEN, ServerSecurity
from pullfill.runtime.health import ServerHealth

# --------------------------------------------------------------------------- what a refusal says

# Codes of gRPC.
_DEADLINE, _NOT_FOUND, _EXHAUSTED, _UNAVAILABLE, _UNAUTHENTICATED = 4, 5, 8, 14, 16
# The same request may succeed later.
_PASSING = frozenset({_DEADLINE, _EXHAUSTED, _UNAVAILABLE, _UNAUTHENTICATED})
# Said of a token from before a change of users or roles. Its code is that of a bad request.
_OLD_AUTH = "revision of auth store is old"


class LeaseNotFound(RegistryUnavailable):
    """etcd does not know the lease."""


class RevisionLost(RegistryUnavailable):
    """The changes since a revision cannot be had: it was compacted, the store was made anew since,
    or a message with changes is too long."""


class Failure(msgspec.Struct):
    """An error of the gateway, of a call or inside a stream."""

    error: Any = None
    code: int = 0
    message: str = ""
    grpc_code: int = 0

    @property
    def text(self) -> str:
        """For people. Empty: it says nothing."""
        return self.message or str(self.error or "")

    @property
    def wants_token(self) -> bool:
        """Whether a new token may help."""
        return self.known_code == _UNAUTHENTICATED or _OLD_AUTH in self.text

    @property
    def known_code(self) -> int:
        """gRPC's code. 0: it says none."""
        return self.code or self.grpc_code


def read_failure(body: bytes) -> Failure:
    try:
        return msgspec.json.decode(body, type=Failure, strict=False)
    except (msgspec.MsgspecError, ValueError):
        return Failure(message=body[:200].decode("utf-8", "replace").strip())


# --------------------------------------------------------------------------- answers

# etcd sends integers as JSON strings and bytes as base64. msgspec reads both as they are.


class Header(msgspec.Struct, frozen=True):
    """The header of an answer of etcd: the store that answered, and its revision.

    date: etcd's clock when it answered, in whole seconds since 1970. 0: unknown.
    """

    cluster_id: int = 0
    revision: int = 0
    raft_term: int = 0
    date: float = 0.0


class KeyValue(msgspec.Struct, frozen=True):
    """One key and its value.

    lease: the id of its lease. 0: it has none."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class Changed(msgspec.Struct):
    """A change of a key. type: `PUT`, or `DELETE`, which leaves the key without a value."""

    kv: KeyValue
    type: str = "PUT"


class Answer(msgspec.Struct):
    """What etcd answers to any call. A field that the call does not have keeps its default.

    kvs: what was read. succeeded: whether a transaction has written.
    id, ttl: of a lease. ttl 0: the lease is gone. token: of a login.
    events: what a watch tells. canceled: it has ended, for a reason that the next fields tell.
    result, error: keep-alives and watches are answered by lines of a stream. Each has one of
    them."""

    header: Header = Header()
    kvs: list[KeyValue] | None = None
    succeeded: bool = False
    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")
    token: str = ""
    events: list[Changed] | None = None
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    result: Answer | None = None
    error: Failure | None = None


def range_of(prefix: str) -> dict[str, bytes]:
    """Return etcd's range of all keys with `prefix`, which is not empty."""
    start = prefix.encode()
    # UTF-8 has no byte 255, so there is one after the last.
    return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}


# --------------------------------------------------------------------------- sockets


def _make_socket(address: Any) -> socket.socket:
    family, kind, proto, _, _ = address
    sock = socket.socket(family, kind, proto)
    tune(sock)
    return sock


# --------------------------------------------------------------------------- calls

# Longest message of a watch, in bytes. etcd puts at most 1000 changes into one.
_LINE = 64 << 20
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, UnicodeError)


class EtcdMember(NamedTuple):
    """One member of etcd. host: an IPv6 address stands in brackets, as in a URL."""

    scheme: str
    host: str
    port: int


class _Api(AioClient):  # type: ignore[misc]
    """`AioClient` for etcd 3.4 and newer, which have one API."""

    def __init__(self, at: EtcdMember, session: aiohttp.ClientSession) -> None:
        # Not its own constructor: the session that it makes checks no certificate.
        super(AioClient, self).__init__(protocol=at.scheme, host=at.host, port=at.port)
        self.session = session

    # It asks with a blocking request, and raises AttributeError if nobody answers.
    def _retrieve_version(self) -> None:
        self.server_version_sem = sem.Version("3.4.0")


# Only checks that etcd answers. Reads a key that does not exist, and that etcdctl can grant.
PROBE = {"key": b"/pullfill/", "count_only": True}


def parse_url(url: str) -> tuple[list[EtcdMember], tuple[str, str] | None]:
    """Endpoints and (user, password) of `[http[s]://][user:password@]host[:port][,...]`.

    Raises ConfigError.
    """
    endpoints, credentials = [], None
    for part in filter(None, (piece.strip() for piece in url.split(","))):
        try:
            pieces = urlsplit(part if "://" in part else f"http://{part}")
            host, port = pieces.hostname, pieces.port or 2379
        except ValueError:
            host, port = None, 0
        if not host or pieces.scheme not in {"http", "https"} or pieces.path not in {"", "/"}:
            raise ConfigError(
                f"cannot read etcd URL {redact.url(url)!r}: use http://HOST:PORT, several "
                "separated by commas"
            )
        if pieces.username is not None:
            credentials = (unquote(pieces.username), unquote(pieces.password or ""))
        endpoints.append(EtcdMember(pieces.scheme, f"[{host}]" if ":" in host else host, port))
    if not endpoints:
        raise ConfigError("no etcd URL given: use --etcd http://HOST:PORT")
    return endpoints, credentials


class EtcdClient:
    """See the module. `connect` is the constructor.

    health: whether etcd answered the last request, and since when that is so.
    last_ok_at: seconds on SYSTEM_CLOCK when the server last answered.
    last_failed_at: when a call or stream last was refused, timed out or broke. -inf: never.
    """

    def __init__(
        self,
        members: list[EtcdMember],
        tls: ssl.SSLContext | None,
        login: Callable[[], tuple[str, str] | None],
        timeout_s: float,
    ) -> None:
        # Read again for each new token: an operator may have changed the password.
        self._login = login
        self._has_login = login() is not None
        connector = aiohttp.TCPConnector(
            # 30 connections, etcd3-py's limit, are too few: 31 watches block a put.
            limit=0,
            socket_factory=_make_socket,
            ssl=True if tls is None else tls,
        )
        session = aiohttp.ClientSession(connector=connector, read_bufsize=_LINE >> 1)
        # The first one is asked.
        self._members = members
        self._api = _Api(members[0], session)
        self._streams: dict[aiohttp.ClientResponse, EtcdMember] = {}
        self._timeout_s = timeout_s
        self.health = ServerHealth("etcd", self._api.baseurl)
        self.last_ok_at = SYSTEM_CLOCK.monotonic()
        self.last_failed_at = float("-inf")

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        wait_s: float = 30.0,
        on_retry: Callable[[str], None] | None = None,
        timeout_s: float = 2.0,
        security: ServerSecurity = OPEN.etcd,
    ) -> Self:
        """Connect to an etcd at `url`. Try for up to `wait_s`.

        on_retry: gets one line for each new reason why a try has failed.
        timeout_s: of each call.

        Raises RegistryUnavailable after `wait_s`, ConfigError at once (bad URL, another server,
        refused credentials)."""
        members, in_url = parse_url(url)
        shown, tls = redact.url(url), security.tls("etcd")
        if tls is not None and any(member.scheme != "https" for member in members):
            raise ConfigError(
                f"[etcd] has certificates, but {shown} is not encrypted: use https://"
            )
        client = cls(members, tls, lambda: security.login() or in_url, timeout_s)
        try:
            await client._first_answer(shown, wait_s, on_retry or (lambda _: None))
        except BaseException:
            await client.close()
            raise
        return client

    async def _first_answer(
        self, shown: str, wait_s: float, on_retry: Callable[[str], None]
    ) -> None:
        give_up, backoff, told = time.monotonic() + wait_s, Backoff(longest_s=1.0), ""
        while True:
            try:
                if self._has_login:
                    await self._authenticate(2.0)
                # Only a linearizable read tells whether it has a leader.
                await self.ping(2.0)
                return
            except RegistryUnavailable as exc:
                cause = exc.__cause__ or exc
                if isinstance(cause, aiohttp.ClientSSLError):
                    raise NotNow(
                        f"no TLS with etcd at {shown} ({_cause(cause)}): check ca, cert and key of "
                        "[etcd] in the --security file, and the host name in the URL"
                    ) from exc
                why = str(cause) or type(cause).__name__
            left = give_up - time.monotonic()
            if left <= 0:
                raise RegistryUnavailable(
                    f"etcd at {shown} did not answer within {wait_s:g} s ({why}): start it "
                    "(`pullfill up` starts one), or name another with --etcd URL"
                )
            if why != told:
                told = why
                on_retry(
                    f"etcd at {shown} does not answer yet ({why}); trying for another {left:.0f} s"
                )
            await asyncio.sleep(min(backoff.next(), left))

    async def call(self, path: str, request: Any, timeout_s: float | None = None) -> Answer:
        """POST `request` to the unary `path`, and return the answer.

        Raises RegistryUnavailable (LeaseNotFound), ConfigError when refused.
        """
        timeout_s = timeout_s or self._timeout_s
        for fresh_token in (False, True):
            token, at = self._api.token, self._members[0]
            status, body, date = await self._exchange(path, request, timeout_s)
            if status == 200:
                break
            failure = read_failure(body)
            if fresh_token or not (self._has_login and failure.wants_token):
                raise self.refused(failure, status, at)
            if self._api.token == token:  # nobody else renewed it meanwhile
                await self._authenticate(timeout_s)
        self.last_ok_at = SYSTEM_CLOCK.monotonic()
        self.health.ok()
        try:
            # etcd3-py's models take 29 ms for 50 keys, and hold empty for absent.
            answer = msgspec.json.decode(body, type=Answer, strict=False)
        except (msgspec.MsgspecError, ValueError) as exc:
            raise self._lost(ValueError(f"this is no answer to {path}: {exc}")) from exc
        if answer.error is not None:
            raise self.refused(answer.error)
        answer = answer.result or answer
        with contextlib.suppress(ValueError):
            now = parsedate_to_datetime(date).timestamp()
            answer.header = msgspec.structs.replace(answer.header, date=now)
        return answer

    def _begin(self, path: str, request: Any, timeout: aiohttp.ClientTimeout) -> Any:
        """Return a POST request to etcd, not sent yet. Raises RegistryUnavailable after `close`."""
        if self._api.session.closed:
            raise RegistryUnavailable("the etcd client is closed")
        data = msgspec.json.encode(request)
        return self._api.call_rpc(path, data=data, raw=True, timeout=timeout)

    async def _exchange(self, path: str, request: Any, timeout_s: float) -> tuple[int, bytes, str]:
        """Return the status of HTTP, the body and the `Date` of the answer, "" if it has none."""
        at = self._members[0]
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._begin(path, request, timeout) as response:
                body = await response.read()
        except _FAILURES as exc:
            raise self._lost(exc, at) from exc
        return response.status, body, response.headers.get("Date", "")

    async def _authenticate(self, timeout_s: float) -> None:
        # `AioClient.auth` removes the token while it waits, so other calls fail meanwhile. There is
        # no need: etcd looks at no token when it makes one.
        request = dict(zip(("name", "password"), self._login() or (), strict=True))
        at = self._members[0]
        status, body, _ = await self._exchange("/auth/authenticate", request, timeout_s)
        if status != 200:
            raise self.refused(read_failure(body), status, at)
        self._api.token = msgspec.json.decode(body, type=Answer, strict=False).token

    async def stream(self, path: str, request: Any, *, idle_s: float) -> AsyncGenerator[bytes]:
        """POST `request` and yield the answer's lines as they come. Close it by hand.

        Raises TimeoutError after `idle_s` of silence, which is no failure. Everything else that
        ends it is RegistryUnavailable, also its end. A token that etcd refuses is renewed by the
        next call, and not here."""
        open_s, at = self._timeout_s, self._members[0]
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=open_s)
        try:
            async with asyncio.timeout(open_s):
                response = await self._begin(path, request, timeout)
        except _FAILURES as exc:
            raise self._lost(exc, at) from exc
        self._streams[response] = at
        try:
            if response.status != 200:
                try:
                    async with asyncio.timeout(open_s):
                        failure = read_failure(await response.read())
                except _FAILURES as exc:
                    raise self._lost(exc, at) from exc
                raise self.refused(failure, response.status, at)
            # etcd3-py's `ResponseIter` keeps in its buffer what it has returned, and returns the
            # first message again and again.
            while True:
                try:
                    async with asyncio.timeout(idle_s) as deadline:
                        line = await response.content.readline()
                except _FAILURES as exc:
                    if deadline.expired():
                        raise
                    raise self._lost(exc, at) from exc
                except (ValueError, HttpProcessingError) as exc:  # by the release of aiohttp
                    # Another member would send the same.
                    raise RevisionLost(f"etcd sent a line of more than {_LINE >> 20} MiB") from exc
                if not line:
                    raise self._lost(EOFError("etcd ended the stream"), at)
                yield line
        finally:
            del self._streams[response]
            _abort(response)

    def refused(
        self, failure: Failure, status: int = 200, at: EtcdMember | None = None
    ) -> RegistryUnavailable | ConfigError:
        """Return the error for an answer other than success.

        at: the member of etcd that answered. None: the present one."""
        text = failure.text or f"HTTP {status}"
        code = failure.known_code
        if code == _NOT_FOUND and "lease" in text:
            return LeaseNotFound(f"etcd: {text}")
        if code in _PASSING or failure.wants_token or status >= 500:
            # Each member would say so if there is no space, or the token is old.
            of_all = code == _EXHAUSTED or failure.wants_token
            return self._lost(RuntimeError(f"etcd: {text}"), at, leave=not of_all)
        advice = ": is it etcd 3.4 or newer?" if status == 404 else ""
        if "CommonName" in text:
            advice = ": with logins on, etcd takes only client certificates without a common name"
        if any(word in text for word in ("user", "password", "permission", "authentication")):
            advice = ": check user and password_file of [etcd] in the --security file"
        return NotNow(f"etcd refused the request: {text}{advice}")

    def _lost(
        self, cause: BaseException, at: EtcdMember | None = None, *, leave: bool = True
    ) -> RegistryUnavailable:
        """Note that a member of etcd has failed, and return the error to raise.

        at: the member. None: the present one.
        leave: from now on use the next member. False: it would refuse the same."""
        failed = at or self._members[0]
        why = str(cause) or ("no answer in time" if isinstance(cause, TimeoutError) else "")
        why = why or type(cause).__name__
        if failed == self._members[0]:
            self.last_failed_at = SYSTEM_CLOCK.monotonic()
            self.health.where = self._api.baseurl
            self.health.failed(why)
            if leave and len(self._members) > 1:
                self._members = self._members[1:] + self._members[:1]
                self._api.protocol, self._api.host, self._api.port = self._members[0]
                # A member that has lost the others, or was stopped, would keep a watch silent.
                for stream, where in self._streams.items():
                    if where == failed:
                        _abort(stream)
        return RegistryUnavailable(f"etcd at {failed.host}:{failed.port} does not answer: {why}")

    async def close(self) -> None:
        """End all connections. Later calls raise RegistryUnavailable. Idempotent."""
        await self._api.close()

    # ------------------------------------------------------------------ keys

    async def put(self, key: str, value: bytes, lease_id: int | None = None) -> int:
        """Write one key. Returns its revision. Raises LeaseNotFound if the lease is gone."""
        done = await self.call("/kv/put", _put(key, value, lease_id))
        return done.header.revision

    async def get(self, key: str) -> KeyValue | None:
        """The key's value (linearizable), or None."""
        answer = await self.call("/kv/range", {"key": key.encode()})
        return answer.kvs[0] if answer.kvs else None

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Return all keys with `prefix`, in their order, and the revision of the store."""
        answer = await self.call("/kv/range", range_of(prefix))
        return answer.kvs or [], answer.header.revision

    async def delete(self, key: str) -> None:
        """Remove one key, if it is there."""
        await self.call("/kv/deleterange", {"key": key.encode()})

    async def put_if(self, key: str, value: bytes, *, mod_revision: int) -> bool:
        """Write if the key is still as it was at `mod_revision` (0: absent). True if written."""
        unchanged = {"key": key.encode(), "target": "MOD", "mod_revision": mod_revision}
        write = {"request_put": _put(key, value, None)}
        done = await self.call("/kv/txn", {"compare": [unchanged], "success": [write]})
        return done.succeeded

    # ------------------------------------------------------------------ leases

    async def grant_lease(self, ttl_s: int) -> Answer:
        """A new lease: its `id` and `ttl`. etcd rounds a TTL below 2 s up to 2."""
        return await self.call("/lease/grant", {"TTL": ttl_s, "ID": 0})

    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and all keys on it. Raises LeaseNotFound."""
        await self.call("/lease/revoke", {"ID": lease_id})

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> Answer:
        """Renew once. If the lease is gone, `ttl` is 0."""
        try:
            return await self.call("/lease/keepalive", {"ID": lease_id}, timeout_s)
        except LeaseNotFound:
            return Answer()

    async def ping(self, timeout_s: float) -> None:
        """Raise RegistryUnavailable unless etcd answers (linearizable) within `timeout_s`."""
        await self.call("/kv/range", PROBE, timeout_s)


def _abort(response: aiohttp.ClientResponse) -> None:
    """End a response and its connection now."""
    # `close` tells the server of an encrypted connection, and waits up to half a minute for its
    # answer. Nobody would own the connection meanwhile, and closing the session would not end it.
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


def _cause(exc: BaseException) -> str:
    """The TLS error inside aiohttp's."""
    inner = getattr(exc, "certificate_error", None) or getattr(exc, "os_error", None) or exc
    return str(getattr(inner, "verify_message", "") or getattr(inner, "reason", "") or inner)


def _put(key: str, value: bytes, lease_id: int | None) -> dict[str, Any]:
    return {"key": key.encode(), "value": value, "lease": lease_id or 0}
