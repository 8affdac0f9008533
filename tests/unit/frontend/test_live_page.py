"""The routes of the live page: files, headers, and the stream of events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from pullfill.frontend.live import page as live_page
from pullfill.frontend.live.page import FILES, EventStream
from tests.support.asgi import Client


class Live:
    """Yields what a test puts in, until `close`."""

    def __init__(self) -> None:
        self.bodies: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.over = asyncio.Event()
        self.viewers = 0

    async def watch(self) -> AsyncIterator[bytes]:
        try:
            while (body := await self.bodies.get()) is not None:
                yield body
        finally:
            self.over.set()


def client(live: Any) -> httpx.AsyncClient:
    unasked: Any = object
    app = Starlette(routes=live_page.routes(live, unasked))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t")


async def test_every_file_that_the_page_names_is_there_and_runs_nothing_of_others() -> None:
    async with client(Live()) as http:
        page = await http.get("/pullfill/ui")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        for name in re.findall(r'(?:href|src)="([^"#]+)"', page.text):
            assert name.startswith("ui/"), "relative, so a proxy may serve it below a prefix"
            file = await http.get(f"/pullfill/{name}")
            assert file.status_code == 200
            assert file.headers["content-security-policy"] == policy
            assert file.headers["x-content-type-options"] == "nosniff"
        script = await http.get("/pullfill/ui/app.js")
        assert script.headers["content-type"].startswith("text/javascript")


def test_scripts_import_what_is_there_and_never_make_elements_of_text() -> None:
    for file in FILES.glob("*.js"):
        text = file.read_text()
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (FILES / name).is_file(), f"{file.name} imports {name}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), "nothing from elsewhere"


@pytest.mark.parametrize(
    "name", ["nothing.js", "index.html", "..%2froutes.py", "app.py", "a" * 300 + ".js"]
)
async def test_other_files_are_not_served(name: str) -> None:
    async with client(Live()) as http:
        assert (await http.get(f"/pullfill/ui/{name}")).status_code == 404


async def test_a_slash_leads_to_the_page() -> None:
    async with client(Live()) as http:
        assert (await http.get("/pullfill/ui/")).headers["location"] == "../ui"


async def test_events_end_with_their_source() -> None:
    live = Live()
    for body in (b'{"a":1}', b'{"b":2}', None):
        live.bodies.put_nowait(body)
    async with client(live) as http:
        answer = await http.get("/pullfill/ui/events")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        assert answer.text == 'retry: 1000\n\ndata: {"a":1}\n\ndata: {"b":2}\n\n'
        live.viewers = live_page.MAX_VIEWERS
        refused = await http.get("/pullfill/ui/events")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "close another page" in refused.json()["error"]


async def test_a_viewer_that_reads_nothing_is_disconnected() -> None:
    live = Live()
    viewer = Client(EventStream(live.watch(), send_s=0.02))
    while len(viewer.sent) < 2:  # noqa: ASYNC110 - nothing tells of a message
        await asyncio.sleep(0)
    viewer.takes.clear()
    live.bodies.put_nowait(b"{}")
    await asyncio.wait_for(viewer.ended(), 5)
    assert live.over.is_set()
