"""Who may call which HTTP route: keys for clients, state-changing routes for administrators only.

A route is open (health and metrics), serving or administrative. Every route that is not listed here
as open or serving is administrative. So a route that a later vLLM adds is closed at first.

Without an admin key, administrative routes answer only to clients on this machine: a peer on a
loopback address, without headers of a proxy or of a browser page (`_from_here`).

The check runs once per request, in front of everything else.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from pullfill.errors import ConfigError
from pullfill.frontend import counters
from pullfill.frontend.admission import ENGINE_PATHS, TEXT_PATHS, respond, route_of
from pullfill.net import http_proof
from pullfill.runtime import log
from pullfill.runtime.watched_files import WatchedFiles
from pullfill.wire import MAX_TEXT

_log = log.get("frontend.http_auth")

# The keys of clients, and those of administrators.
Keys = tuple[Sequence[str], Sequence[str]]

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping", "/metrics", "/metrics/"})
SERVING_PATHS = ENGINE_PATHS | TEXT_PATHS | {
    "/v1/models", "/tokenizer_info", "/version", "/load", "/docs", "/docs/oauth2-redirect",
    "/redoc", "/openapi.json", "/pullfill/status",
}  # fmt: skip
SERVING_PREFIXES = ("/v1/models/", "/v1/responses/", "/pullfill/requests/")
# The live page is administrative, and a browser cannot send what other clients send. So for its
# paths, which only read, a key may come as the password of HTTP Basic, and a page of this frontend
# may ask on this machine. It must have come by a loopback name, or a page of another site could
# point its own name at this machine.
PAGE = "/pullfill/ui"
# Other frontends and pullfill's commands find this frontend in etcd. They show no key, but the
# proof of one (pullfill/net/http_proof.py). With such a proof they may GET these paths, as a client
# with a key may.
PROOF_PATHS = ("/pullfill/status", "/pullfill/requests/", f"{PAGE}/events")
_PAGE_PREFIX = f"{PAGE}/"
_SPOKEN_FOR = frozenset({b"forwarded", b"via", b"x-real-ip", b"origin", b"sec-fetch-site"})
_SPOKEN_FOR_PREFIXES = (b"x-forwarded-", b"x-envoy-")
# What a browser says of an address that its user has typed, and of what a page asks of its own.
_OF_PAGE = frozenset({(b"sec-fetch-site", b"none"), (b"sec-fetch-site", b"same-origin")})
_LOOPBACK_NAME = re.compile(rb"(?i)(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
_CHALLENGE = ((b"www-authenticate", b'Basic realm="pullfill", charset="UTF-8"'),)


class HttpAuth:
    """ASGI middleware. See the module.

    api_keys: one of these opens the serving routes. Empty: serving routes need no key.
    admin_keys: one of these opens all routes.
    root_path: prefix that the app removes from paths. It is set in each request's scope.
    known: whether the app has a route for an HTTP request. Others get 404.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        admin_keys: Sequence[str],
        root_path: str = "",
        known: Callable[[Scope], bool] = lambda _: True,
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._known = known
        # To look through all routes takes long, and most requests are for these.
        self._present = frozenset(
            path
            for path in SERVING_PATHS | OPEN_PATHS
            if known({"type": "http", "method": "GET", "path": path})
        )
        self._take(api_keys, admin_keys)

    def _take(self, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._api = [http_proof.digest(key.encode()) for key in api_keys]
        self._admin = [http_proof.digest(key.encode()) for key in admin_keys]

    async def follow(self, files: WatchedFiles, read: Callable[[], Keys]) -> None:
        """Take the keys that `read` returns when their files have changed. Runs until cancelled.

        read: called in a thread. Raises ConfigError if files cannot be used: the last good keys
        stay."""
        while True:
            await files.wait()
            try:
                now = await asyncio.to_thread(read)
            except ConfigError as exc:
                _log.warning("%s; the last good keys stay", exc)
            else:
                self._take(*now)
                _log.info("took new keys: %d for clients, %d for administrators", *map(len, now))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, page = 0, False
        if scope["type"] in ("http", "websocket"):
            if self._root_path:
                scope["root_path"] = self._root_path
            page = _is_page(scope)
            shown = _use_bearer(scope, page)
            status, why = self._judge(scope, page, shown)
            path = route_of(scope)
            # Not before the key is right: without it nobody learns which routes there are.
            if status != 401 and scope["type"] == "http" and path not in self._present:
                if not self._known(scope):
                    status, why = 404, f"this frontend has no route {path[:MAX_TEXT]}"
        if not status:
            await self._app(scope, receive, send)
            return
        if status != 404:
            counters.AUTH_REFUSED.labels(str(status)).inc()
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            challenge = _CHALLENGE if status == 401 and page else ()
            await respond(send, status, why, challenge)

    def _judge(self, scope: Scope, page: bool, shown: bytes | None) -> tuple[int, str]:
        """Return (0, "") if the request may pass, else the HTTP status and the message.

        shown: the digest of its key."""
        path, method = route_of(scope), scope.get("method", "GET")
        if path in OPEN_PATHS or method == "OPTIONS":
            return 0, ""
        if _any(shown, self._admin):
            return 0, ""
        if self._api and not _any(shown, self._api) and not self._proven(scope, path):
            return 401, (
                "this frontend wants an API key: send `Authorization: Bearer KEY` or "
                "`x-api-key: KEY`"
            )
        if path in SERVING_PATHS or path.startswith(SERVING_PREFIXES):
            return 0, ""
        if self._admin and page:
            return 401, f"{path} is for administrators: the password is an admin key"
        if self._admin:
            return 403, f"{path} is for administrators: send `Authorization: Bearer ADMIN_KEY`"
        if _from_here(scope, page):
            return 0, ""
        port = (scope.get("server") or ("", "PORT"))[1]
        return 403, (
            f"{path} is for administrators. Without an admin key it answers only on this machine, "
            f"at {scope.get('scheme', 'http')}://127.0.0.1:{port}{path} (from another: first `ssh "
            f"-L {port}:127.0.0.1:{port} THIS_MACHINE`). Or set [frontend] admin_key_file of "
            "--security: docs/operations.md"
        )

    def _proven(self, scope: Scope, path: str) -> bool:
        """Whether the request has the proof of a key, and asks for what a proof opens."""
        if scope.get("method") != "GET" or not path.startswith(PROOF_PATHS):
            return False
        name = http_proof.HEADER.encode()
        values = [value for header, value in scope["headers"] if header == name]
        known = (*self._api, *self._admin)
        return len(values) == 1 and http_proof.proven(values[0], path, known, time.time())


def _any(shown: bytes | None, keys: list[bytes]) -> bool:
    """Whether `shown` is one of the keys. Takes the same time whichever it is."""
    # A list, so that `any` does not stop at the first.
    return shown is not None and any([hmac.compare_digest(shown, key) for key in keys])


def _is_page(scope: Scope) -> bool:
    """Whether the request is for the live page."""
    if scope["type"] != "http" or scope.get("method") not in ("GET", "HEAD"):
        return False
    path = route_of(scope)
    return path == PAGE or path.startswith(_PAGE_PREFIX)


def _use_bearer(scope: Scope, page: bool) -> bytes | None:
    """Rewrite the request's keys as `Authorization: Bearer KEY`. Return the digest of its only key.

    A key in `x-api-key` counts if the request has no other. At the live page the password of HTTP
    Basic is a key, too. The user's name may be any."""
    headers, bearer, api = [], list[bytes](), list[bytes]()
    for name, value in scope["headers"]:
        if name == b"authorization":
            if (shown := _of_password(value) if page else value) is not None:
                bearer.append(shown)
        elif name == b"x-api-key":
            api.append(b"Bearer " + value)
        else:
            headers.append((name, value))
    keys = bearer or api
    scope["headers"] = headers + [(b"authorization", value) for value in keys]
    scheme, _, key = keys[0].partition(b" ") if len(keys) == 1 else (b"", b"", b"")
    return http_proof.digest(key.strip()) if scheme.lower() == b"bearer" else None


def _of_password(value: bytes) -> bytes | None:
    """Return the Bearer key for HTTP Basic, and other schemes as they are. None: unreadable."""
    scheme, _, coded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return value
    try:
        return b"Bearer " + base64.b64decode(coded, validate=True).partition(b":")[2]
    except binascii.Error:
        return None


def _from_here(scope: Scope, page: bool) -> bool:
    """Whether the request was made on this machine, as far as its headers tell."""
    headers = scope["headers"]
    if page:
        names = [value for name, value in headers if name == b"host"]
        if not all(map(_LOOPBACK_NAME.fullmatch, names)):
            return False
        # A browser names the origin where it loads a page's modules.
        own = {(b"origin", scheme + name) for name in names for scheme in (b"http://", b"https://")}
        headers = [h for h in headers if h not in _OF_PAGE and h not in own]
        if route_of(scope) == PAGE and (b"sec-fetch-dest", b"document") in headers:
            # A link on another site may lead here. That site sees nothing of it.
            headers = [(name, value) for name, value in headers if name != b"sec-fetch-site"]
    if any(n in _SPOKEN_FOR or n.startswith(_SPOKEN_FOR_PREFIXES) for n, _ in headers):
        return False
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
