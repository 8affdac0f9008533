"""Who may call which HTTP route: keys for clients, state-changing routes for administrators only.

A route is open (health and metrics), serving or administrative. Every route that is not listed here
as open or serving is administrative. So a route that a later vLLM adds is closed at first.

Without an admin key, administrative routes answer only to clients on this machine: a peer on a
loopback address, without headers of a proxy or of a browser page.

The check runs once per request, in front of everything else.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from pullfill.frontend import metrics
from pullfill.frontend.admission import ENGINE_PATHS, App, Receive, Scope, Send, respond, route_of

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping", "/metrics", "/metrics/"})
SERVING_PATHS = ENGINE_PATHS | {
    "/v1/models", "/v1/chat/completions/render", "/v1/chat/completions/derender",
    "/v1/completions/render", "/v1/completions/derender", "/v1/messages/render",
    "/v1/messages/count_tokens", "/v1/responses/render", "/cohere/v2/chat/render",
    "/tokenize", "/detokenize", "/tokenizer_info", "/version", "/load", "/docs",
    "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/pullfill/status",
}  # fmt: skip
SERVING_PREFIXES = ("/v1/models/", "/v1/responses/", "/pullfill/requests/")
_SPOKEN_FOR = frozenset({b"forwarded", b"via", b"x-real-ip", b"origin", b"sec-fetch-site"})
_SPOKEN_FOR_PREFIXES = (b"x-forwarded-", b"x-envoy-")


class HttpAuth:
    """ASGI middleware. See the module.

    api_keys: one of these opens the serving routes. Empty: serving routes need no key.
    admin_keys: one of these opens all routes.
    root_path: prefix that the app removes from paths. It is set in each request's scope.
    """

    def __init__(
        self,
        app: App,
        api_keys: Iterable[str],
        admin_keys: Iterable[str],
        root_path: str = "",
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._api = [_digest(key.encode()) for key in api_keys]
        self._admin = [_digest(key.encode()) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        if scope["type"] in ("http", "websocket"):
            if self._root_path:
                scope["root_path"] = self._root_path
            status, why = self._judge(scope)
        if not status:
            await self._app(scope, receive, send)
            return
        metrics.AUTH_REFUSED.labels(str(status)).inc()
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            kind = "AuthenticationError" if status == 401 else "PermissionDeniedError"
            await respond(send, status, why, kind)

    def _judge(self, scope: Scope) -> tuple[int, str]:
        """Return (0, "") if the request may pass, else the HTTP status and the message."""
        path, method = route_of(scope), scope.get("method", "GET")
        if path in OPEN_PATHS or method == "OPTIONS":
            return 0, ""
        shown = _bearer(scope)
        if _any(shown, self._admin):
            return 0, ""
        if self._api and not _any(shown, self._api):
            return 401, "this frontend wants an API key: send `Authorization: Bearer KEY`"
        if path in SERVING_PATHS or path.startswith(SERVING_PREFIXES):
            return 0, ""
        if self._admin:
            return 403, f"{path} is for administrators: send `Authorization: Bearer ADMIN_KEY`"
        if _from_here(scope):
            return 0, ""
        return 403, (
            f"{path} is for administrators, and without an admin key it answers to this machine "
            "only: see docs/operations.md"
        )


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32).digest()


def _any(shown: bytes | None, keys: list[bytes]) -> bool:
    """Whether `shown` is one of the keys. Takes the same time whichever it is."""
    if shown is None:
        return False
    found = False
    for key in keys:
        found |= hmac.compare_digest(shown, key)
    return found


def _bearer(scope: Scope) -> bytes | None:
    """Return the digest of the key in the Authorization header."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return _digest(token.strip()) if scheme.lower() == b"bearer" else None


def _from_here(scope: Scope) -> bool:
    """Whether the request was made on this machine, as far as its headers tell."""
    if any(n in _SPOKEN_FOR or n.startswith(_SPOKEN_FOR_PREFIXES) for n, _ in scope["headers"]):
        return False
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
