"""Every route of the installed vLLM that takes a POST is known: it runs an engine, is harmless, or
is for administrators. Read from vLLM's source, so that no flag, task or plugin hides one."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from starlette._utils import get_route_path

from pullfill import releases
from pullfill.engine.check import base_version, require_version
from pullfill.frontend.admission import ENGINE_PATHS, TEXT_PATHS, route_of
from pullfill.frontend.http_auth import OPEN_PATHS, SERVING_PATHS, SERVING_PREFIXES

ADMIN = {
    "/abort_requests", "/collective_rpc", "/fault_tolerance/apply", "/finish_weight_update",
    "/inference/v1/abort_requests", "/init_weight_transfer_engine", "/is_scaling_elastic_ep",
    "/pause", "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache",
    "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/shutdown_weight_transfer_engine",
    "/sleep", "/start_draft_weight_update", "/start_profile", "/start_weight_update",
    "/stop_profile", "/update_weight_version", "/update_weights", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/wake_up", "/weight_checker",
}  # fmt: skip
HARMLESS = {"/ping", "/v1/responses/{response_id}/cancel"}
"""They do nothing, or forget a request."""
OLD = {"/generate"}
"""Counted although the newest vLLM does not have it."""


METHOD = re.compile(r"\b(post|put|patch|delete|POST)\b")
"""In each file that has a route which is not GET. To parse the others takes longer."""


def post_routes() -> Iterator[str]:
    """Paths in `@X.post("/path")` and `X.add_api_route("/path", …, methods=["POST"])`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for file in (Path(spec.origin).parent / "entrypoints").rglob("*.py"):
        text = file.read_text()
        if not METHOD.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            first = node.args[0] if node.args else None
            if not (isinstance(first, ast.Constant) and str(first.value).startswith("/")):
                continue
            methods = next((ast.dump(k.value) for k in node.keywords if k.arg == "methods"), "")
            if node.func.attr in ("post", "put", "patch", "delete") or "'POST'" in methods:
                yield str(first.value)


def test_every_post_route_of_vllm_is_classified() -> None:
    routes = set(post_routes())
    assert len(routes) > 50, "where are they?"
    known = ENGINE_PATHS | TEXT_PATHS | ADMIN | HARMLESS
    assert routes <= known
    if base_version(require_version()) == releases.VLLM:
        assert known - routes == OLD


def test_the_classes_are_what_the_guard_makes_of_them() -> None:
    open_to_clients = OPEN_PATHS | SERVING_PATHS
    assert ENGINE_PATHS <= SERVING_PATHS
    assert not ADMIN & open_to_clients
    assert not [path for path in ADMIN if path.startswith(SERVING_PREFIXES)]
    assert all(p in open_to_clients or p.startswith(SERVING_PREFIXES) for p in HARMLESS)


@given(
    path=st.text("/ab", max_size=6).map(lambda rest: "/" + rest),
    root=st.text("/ab", max_size=4),
)
def test_a_route_is_what_starlette_will_find(path: str, root: str) -> None:
    scope = {"path": path, "root_path": root}
    assert route_of(scope) == get_route_path(scope)
