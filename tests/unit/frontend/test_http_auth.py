"""Who may call which HTTP route. The peer's address is what ASGI says it is."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import operator
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette._utils import get_route_path

from pullfill import releases
from pullfill.engine.check import base_version, require_version
from pullfill.frontend.admission import ENGINE_PATHS, TEXT_PATHS, route_of
from pullfill.frontend.http_auth import OPEN_PATHS, SERVING_PATHS, HttpAuth
from pullfill.net import http_proof
from pullfill.net.security import FrontendSecurity
from pullfill.runtime.watched_files import WatchedFiles
from tests.support.asgi import Client
from tests.support.waiting import soon

KEY, OTHER, ADMIN = "client-key-0123456789", "client-key-number-two", "admin-key-0123456789"
HERE, THERE = ("127.0.0.1", 1), ("192.0.2.7", 1)
RESET = "/reset_prefix_cache"
FOR_ADMINS = {
    "/abort_requests", "/collective_rpc", "/fault_tolerance/apply", "/finish_weight_update",
    "/inference/v1/abort_requests", "/init_weight_transfer_engine", "/is_scaling_elastic_ep",
    "/pause", "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache",
    "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/shutdown_weight_transfer_engine",
    "/sleep", "/start_draft_weight_update", "/start_profile", "/start_weight_update",
    "/stop_profile", "/update_weight_version", "/update_weights", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/wake_up", "/weight_checker",
}  # fmt: skip
"""Routes of vLLM."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"status": 200})


async def ask(
    auth: HttpAuth,
    path: str,
    method: str = "POST",
    *,
    client: Any = THERE,
    key: str | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    kind: str = "http",
) -> Client:
    """Status 200: the request reached the app behind."""
    keys = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    return await Client(auth, path, method, [*headers, *keys], type=kind, client=client).ended()


def call(
    path: str,
    method: str = "POST",
    *,
    api: Sequence[str] = (),
    admin: Sequence[str] = (),
    root: str = "",
    known: Any = lambda _: True,
    **asked: Any,
) -> int:
    """Return the status. asked: see `ask`."""
    return asyncio.run(ask(HttpAuth(app, api, admin, root, known), path, method, **asked)).status


def proof(key: str, path: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-pullfill-proof", http_proof.proof(key.encode(), path, time.time()).encode())]


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_health_and_metrics_are_open_to_all(path: str) -> None:
    assert call(path, "GET", api=(KEY,), admin=(ADMIN,)) == 200


@pytest.mark.parametrize("path", [*sorted(SERVING_PATHS), "/v1/responses/r/cancel"])
def test_serving_needs_an_api_key_where_there_is_one(path: str) -> None:
    assert call(path) == 200
    assert call(path, api=(KEY,)) == 401
    assert call(path, api=(KEY,), key="wrong") == 401
    assert call(path, api=(KEY,), client=HERE) == 401
    for key in (KEY, OTHER, ADMIN):
        assert call(path, api=(KEY, OTHER), admin=(ADMIN,), key=key) == 200


@pytest.mark.parametrize(
    "path",
    [*sorted(FOR_ADMINS), "/server_info", "/what/a/later/release/adds", "/v1/completions/../sleep",
     ""],
)  # fmt: skip
@pytest.mark.essential
def test_what_changes_state_or_is_unknown_is_for_administrators(path: str) -> None:
    assert call(path) == 403
    assert call(path, client=HERE) == 200
    assert call(path, client=HERE, api=(KEY,)) == 401
    assert call(path, client=HERE, api=(KEY,), key=KEY) == 200
    assert call(path, api=(KEY,), key=KEY) == 403
    assert call(path, admin=(ADMIN,), client=HERE) == 403
    assert call(path, admin=(ADMIN,), api=(KEY,), key=KEY, client=HERE) == 403
    assert call(path, admin=(ADMIN,), key=ADMIN) == 200


@pytest.mark.parametrize(
    "header",
    [b"x-forwarded-for", b"x-forwarded-host", b"forwarded", b"x-real-ip", b"origin", b"via",
     b"sec-fetch-site", b"x-envoy-external-address"],
)  # fmt: skip
def test_who_is_spoken_for_is_not_here(header: bytes) -> None:
    """A proxy on this machine, or a page in a browser on it."""
    assert call(RESET, client=HERE, headers=[(header, b"127.0.0.1")]) == 403
    assert call(RESET, client=THERE, headers=[(header, b"127.0.0.1")]) == 403


@pytest.mark.parametrize(
    ("client", "status"),
    [
        (("127.8.9.1", 1), 200), (("::1", 1), 200), (("::ffff:127.0.0.1", 1), 200),
        (("::ffff:192.0.2.7", 1), 403), (("0.0.0.0", 1), 403), (("localhost", 1), 403),
        (("", 0), 403), (None, 403),
    ],
)  # fmt: skip
def test_which_peers_are_on_this_machine(client: Any, status: int) -> None:
    assert call(RESET, client=client) == status


def test_a_root_path_changes_nothing_about_a_route() -> None:
    for path in ("/v1/completions", "/api/v1/completions"):
        assert call(path, root="/api") == 200
    for path in (RESET, "/api" + RESET, "/api/api/v1/completions", "/apiv1/completions"):
        assert call(path, root="/api") == 403
    assert call("/api/live", "GET", api=(KEY,), root="/api") == 200
    assert call("/api/live", "GET", api=(KEY,)) == 401


def test_websockets_are_guarded_and_preflight_requests_pass() -> None:
    assert call("/v1/realtime", kind="websocket", api=(KEY,)) == 1008
    assert call("/v1/realtime", kind="websocket", admin=(ADMIN,), key=ADMIN) == 200
    assert call("/v1/completions", "OPTIONS", api=(KEY,)) == 200


@given(
    header=st.one_of(
        st.binary(max_size=80),
        st.sampled_from([b"Bearer", b"bearer ", b"Basic " + KEY.encode(), KEY.encode()]),
    ),
    path=st.text(max_size=40),
)
def test_no_header_that_is_not_the_key_is_the_key(header: bytes, path: str) -> None:
    path = f"/{path}"
    status = call(path, api=(KEY,), headers=[(b"authorization", header)])
    assert status == (200 if path in OPEN_PATHS else 401)


@pytest.mark.parametrize("path", ["/pullfill/status", "/pullfill/requests/cmpl-ä"])
def test_the_proof_of_a_key_opens_what_other_frontends_and_commands_ask(path: str) -> None:
    def asked(key: str, of: str = path, method: str = "GET") -> int:
        return call(path, method, api=(KEY, OTHER), admin=(ADMIN,), headers=proof(key, of))

    assert [asked(key) for key in (KEY, OTHER, ADMIN)] == [200] * 3
    assert asked("a key that nobody knows") == 401
    assert asked(KEY, of="/pullfill/requests/another") == 401
    assert asked(KEY, method="POST") == 401


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", RESET, "/pullfill/ui"])
def test_a_proof_opens_nothing_else(path: str) -> None:
    for key in (KEY, ADMIN):
        assert call(path, "GET", api=(KEY,), admin=(ADMIN,), headers=proof(key, path)) == 401


def test_a_proof_shows_the_live_events_to_this_machine_only() -> None:
    """As an API key does. Where there are admin keys they need one."""
    path = "/pullfill/ui/events"
    for key, shown in ((KEY, ()), (None, proof(KEY, path))):
        assert call(path, "GET", api=(KEY,), key=key, headers=shown, client=HERE) == 200
        assert call(path, "GET", api=(KEY,), key=key, headers=shown) == 403
        assert call(path, "GET", api=(KEY,), admin=(ADMIN,), key=key, headers=shown) == 401


def test_two_keys_in_one_request_are_none() -> None:
    both = [(b"authorization", f"Bearer {k}".encode()) for k in (KEY, "x")]
    assert call("/v1/completions", api=(KEY,), headers=both) == 401


def test_anthropics_header_holds_a_key_too() -> None:
    shown = [(b"x-api-key", KEY.encode())]
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/models"):
        assert call(path, api=(KEY,), headers=shown) == 200
        assert call(path, api=(KEY,), headers=shown * 2) == 401
        assert call(path, api=(KEY,), headers=[(b"x-api-key", b"wrong")]) == 401
        assert call(path, api=(KEY,), headers=shown, key="wrong") == 401


def test_a_path_without_a_route_is_404_once_the_key_is_right() -> None:
    def known(scope: Any) -> bool:
        return scope["path"] in ("/v1/completions", RESET)

    for path in ("/v1/embeddings", "/v1/audio/transcriptions", "/v1/nothing", "/pullfill/x"):
        assert call(path, api=(KEY,), known=known) == 401
        assert call(path, api=(KEY,), key=KEY, known=known) == 404
        assert call(path, client=HERE, known=known) == 404
    assert call("/v1/completions", known=known) == 200
    assert call(RESET, known=known) == 403


async def test_keys_are_taken_from_changed_files_while_it_serves(tmp_path: Path) -> None:
    async def shown(key: str) -> bool:
        return (await ask(auth, "/v1/models", key=key)).status == 200

    file = tmp_path / "api"
    file.touch(0o600)
    file.write_text(KEY)
    keys = FrontendSecurity(api_key_file=str(file))
    auth = HttpAuth(app, keys.api_keys(), ())
    files = WatchedFiles(*keys.key_files(), every_s=0.01)
    task = asyncio.create_task(auth.follow(files, lambda: (keys.api_keys(), ())))
    assert not await shown(OTHER)
    file.write_text(f"{KEY}\n{OTHER}\n")
    await soon(lambda: shown(OTHER))
    assert await shown(KEY)
    file.write_text("short")  # no usable file: the last good keys stay
    await asyncio.sleep(0.1)
    assert await shown(KEY)
    file.write_text(OTHER)
    await soon(lambda: shown(KEY), good=operator.not_)
    assert await shown(OTHER)
    task.cancel()


PAGE_PATHS = (
    "/pullfill/ui",
    "/pullfill/ui/events",
    "/pullfill/ui/app.js",
    "/pullfill/ui/requests/r",
)


def basic(password: str, user: str = "") -> list[tuple[bytes, bytes]]:
    coded = base64.b64encode(f"{user}:{password}".encode())
    return [(b"authorization", b"Basic " + coded)]


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_the_live_page_is_for_administrators(path: str) -> None:
    assert call(path, "GET") == 403
    assert call(path, "GET", client=HERE) == 200
    assert call(path, "GET", api=(KEY,), key=KEY) == 403
    assert call(path, "GET", api=(KEY,), client=HERE) == 401
    assert call(path, "GET", admin=(ADMIN,), client=HERE) == 401
    assert call(path, "GET", admin=(ADMIN,), api=(KEY,), key=KEY) == 401
    assert call(path, "GET", admin=(ADMIN,), key=ADMIN) == 200


def test_a_browser_shows_a_key_as_a_password_for_the_page_only() -> None:
    for path in PAGE_PATHS:
        assert call(path, "GET", admin=(ADMIN,), headers=basic(ADMIN)) == 200
        assert call(path, "HEAD", admin=(ADMIN,), headers=basic(ADMIN, "any")) == 200
        assert call(path, "GET", admin=(ADMIN,), headers=basic("wrong")) == 401
        assert call(path, "GET", api=(KEY,), client=HERE, headers=basic(KEY)) == 200
        assert call(path, "POST", admin=(ADMIN,), headers=basic(ADMIN)) == 403
    # A browser sends a password that it knows to every path, also for a page of another site.
    for path in (RESET, "/pullfill/uix", "/v1/load_lora_adapter"):
        assert call(path, admin=(ADMIN,), headers=basic(ADMIN)) == 403
        assert call(path, "GET", admin=(ADMIN,), headers=basic(ADMIN)) == 403
    broken = [(b"authorization", b"Basic %%%")]
    beside = [*broken, (b"x-api-key", ADMIN.encode())]
    assert call(PAGE_PATHS[0], "GET", admin=(ADMIN,), headers=beside) == 200
    assert call(PAGE_PATHS[0], "GET", admin=(ADMIN,), headers=broken) == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000", "sec-fetch-site": "none"}, 200),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"host": "localhost:8", "origin": "http://localhost:8"}, 200),
        ({"host": "localhost:8", "origin": "http://localhost:9"}, 403),
        ({"host": "localhost:8", "origin": "null"}, 403),
        ({"host": "evil.example:8", "origin": "http://evil.example:8"}, 403),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "localhost", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "localhost", "sec-fetch-site": "same-site"}, 403),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
        ({"host": "localhost", "x-forwarded-for": "1.2.3.4"}, 403),
        # A page whose name leads to 127.0.0.1 is of the same origin, so only its name tells.
        ({"host": "evil.example:8000", "sec-fetch-site": "same-origin"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
    ],
)  # fmt: skip
def test_on_this_machine_only_the_page_itself_may_ask(headers: dict[str, str], status: int) -> None:
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert call("/pullfill/ui/events", "GET", client=HERE, headers=sent) == status
    assert call("/pullfill/ui/events", "GET", client=THERE, headers=sent) == 403


def test_a_link_may_lead_to_the_page_and_to_nothing_else() -> None:
    link = [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-dest", b"document")]
    assert call("/pullfill/ui", "GET", client=HERE, headers=link) == 200
    assert call("/pullfill/ui", "GET", client=THERE, headers=link) == 403
    for path in ("/pullfill/ui/events", "/pullfill/ui/requests/r", RESET):
        assert call(path, "GET", client=HERE, headers=link) == 403
    for dest in (b"iframe", b"script", b"empty"):
        other = [link[0], (b"sec-fetch-dest", dest)]
        assert call("/pullfill/ui", "GET", client=HERE, headers=other) == 403


async def test_a_browser_is_asked_for_a_password_at_the_page_only() -> None:
    auth = HttpAuth(app, (KEY,), (ADMIN,))
    told = [(await ask(auth, path, "GET")).headers for path in ("/pullfill/ui", RESET)]
    challenges = [headers.get(b"www-authenticate") for headers in told]
    assert challenges == [b'Basic realm="pullfill", charset="UTF-8"', None]


# ---------------------------------------------------------------------------
# Every route of the installed vLLM that takes a POST is known: it runs an engine, is harmless, or
# is for administrators. Read from vLLM's source, so that no flag, task or plugin hides one.


HARMLESS = {"/ping", "/v1/responses/{response_id}/cancel"}
"""They do nothing, or forget a request."""
ELSEWHERE = {"/generate", "/v1/decisions"}
"""Only older releases have the first, and only later ones (0.33) the second."""


ROUTE = re.compile(
    r"""\.(?:post|put|patch|delete)\(\s*"(/[^"]*)"|\.\w*route\(\s*"(/[^"]*)"[^)]*"POST\""""
)


def post_routes() -> set[str]:
    """Paths in `@X.post("/path")` and, e.g., `X.add_api_route("/path", …, methods=["POST"])`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    files = (Path(spec.origin).parent / "entrypoints").rglob("*.py")
    return {one or other for file in files for one, other in ROUTE.findall(file.read_text())}


def test_every_post_route_of_vllm_is_classified() -> None:
    routes = post_routes()
    assert len(routes) > 50, "where are they?"
    known = ENGINE_PATHS | TEXT_PATHS | FOR_ADMINS | HARMLESS
    assert routes <= known
    if base_version(require_version()) == releases.VLLM:
        assert known - routes == ELSEWHERE


@given(
    path=st.text("/ab", max_size=6).map(lambda rest: "/" + rest),
    root=st.text("/ab", max_size=4),
)
def test_a_route_is_what_starlette_will_find(path: str, root: str) -> None:
    scope = {"path": path, "root_path": root}
    assert route_of(scope) == get_route_path(scope)
