"""The live page in a real browser: of a cluster with mock engines, and of a scripted one.

A page fails its test if it logs an error to the console or raises one. `make install` brings
playwright; chromium is Debian's (`apt-get install chromium`). Without one of them the test is
skipped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import prompts
from tests.support.cluster import MOCK, Cluster
from tests.support.live_script import DRAINING, EVIL, serving
from tests.support.prompts import random_prompt

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.engine

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """It has a profile of its own, which goes with it."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make install")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def look(browser: Browser, url: str) -> Iterator[tuple[Page, list[str]]]:
    """Open a page, and check at the end that nothing went wrong on it.

    Yields also a list, for parts of messages that are no error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(_PATIENCE_MS)
    page, errors, expected = context.new_page(), list[str](), list[str]()
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda r: errors.append(f"{r.url} failed: {r.failure}"))
    try:
        page.goto(url)
        yield page, expected
        assert [e for e in errors if not any(part in e for part in expected)] == []
    finally:
        context.close()


TOKENS = 2000
TOKENS_PER_S = 800.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Cluster]:
    """A pair that takes seconds for a prompt, so that a page sees it on its way."""
    slow = json.dumps({"mock": {"prefill_tokens_per_s": TOKENS_PER_S}})
    decode = ("decode", *MOCK, "--additional-config", json.dumps({"mock": {}}))
    prefill = ("prefill", *MOCK, "--additional-config", slow)
    with Cluster(tmp_path_factory.mktemp("page"), model_path) as cluster:
        yield cluster.start(decode, prefill, "frontend", policy="always_remote")


def ask(cluster: Cluster, seed: int) -> str:
    return prompts.ask(cluster, random_prompt(TOKENS, seed=seed), 8, logprobs=None).request_id


@pytest.mark.essential
def test_a_job_is_seen_on_its_way_and_the_page_survives_its_frontend(
    pair: Cluster, browser: Browser
) -> None:
    with (
        look(browser, f"{pair.frontend_url}/pullfill/ui") as (page, expected),
        ThreadPoolExecutor(2) as pool,
    ):
        page.locator("#workers tbody tr").nth(1).wait_for()
        asked = [pool.submit(ask, pair, seed) for seed in (1, 2)]
        page.locator("[data-lane=prefill] .chip").first.wait_for()
        flow = page.evaluate("window.pullfill.memory.snapshot.flows[0]")
        assert flow["tokens"] == TOKENS
        assert flow["decode"].startswith("decode")
        for lane in ("queue", "decode", "prompt"):
            assert page.locator(f"[data-lane={lane}]").is_visible()
        ids = [future.result(60) for future in asked]
        for request_id in ids:
            page.locator("#ended tr", has_text=request_id[-10:]).wait_for()
        row = page.locator("#ended tr", has_text=ids[0][-10:])
        assert "remote" in row.inner_text()
        row.locator("button").click()
        page.locator("dialog svg.fall").wait_for()
        text = page.locator("dialog").inner_text()
        assert pair.of("prefill")[0].instance_id in text
        page.keyboard.press("Escape")
        prefill = page.evaluate("window.pullfill.memory.ended.at(-1).stages.prefill")
        assert prefill > 0.5e3 * TOKENS / TOKENS_PER_S

        expected += ["ERR_", "/ui/events failed"]
        (old,) = pair.of("frontend")
        url = pair.frontend_url
        assert old.stop(20.0) == 0, "its drain does not wait for a page"
        page.locator("#link", has_text="connecting again").wait_for()
        new = pair.launch("frontend", "--port", url.rpartition(":")[2])
        pair.frontend_url = url
        pair.wait_ready(new)
        page.locator("#link", has_text="live").wait_for()
        third = ask(pair, 3)
        page.locator("#ended tr", has_text=third[-10:]).wait_for()
        assert page.locator("#ended tr", has_text=ids[0][-10:]).count() == 1, "it remembers"


# Over a scripted cluster. No engine.


PAGE = "/pullfill/ui"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as served:
        yield served + PAGE


@pytest.mark.essential
def test_the_page_shows_a_cluster_and_runs_no_text_of_requests(browser: Browser, url: str) -> None:
    with look(browser, url) as (page, _):
        page.wait_for_selector("#workers tbody tr")
        assert page.locator("#link").inner_text() == "live"
        assert page.locator("#workers tbody tr").count() == 8
        row = page.locator("#workers tr", has_text=DRAINING)
        assert "draining" in row.inner_text()
        lanes = page.locator(".lane")
        assert lanes.count() == 5
        assert page.locator(".chip").count() > 5
        page.wait_for_function(
            "() => window.pullfill.memory.snapshot.flows.some(f => f.id.includes('<img'))"
        )
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        page.evaluate("id => window.pullfill.detail.request(id)", EVIL)
        assert EVIL in page.locator("dialog h2").inner_text()
        assert page.locator("img").count() == 0


def test_a_request_opens_its_waterfall_and_a_worker_its_load(browser: Browser, url: str) -> None:
    with look(browser, url) as (page, _):
        page.locator("#ended button").first.click()
        fall = page.locator("dialog svg.fall")
        fall.wait_for()
        assert fall.locator("rect.actual").count() == 9
        assert fall.locator("rect.expected").count() == 3
        assert "prefill 921 ms" in str(fall.get_attribute("aria-label"))
        assert "310 ms" in page.locator("dialog table").inner_text(), "what was predicted"
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()
        page.locator("#workers button", has_text=DRAINING).click()
        assert "draining" in page.locator("dialog").inner_text()
        page.locator("dialog button", has_text="Close").click()
        assert "15 (50 %)" in page.locator("#decisions").inner_text()
        page.keyboard.press("p")
        assert page.locator("#link").inner_text() == "paused"
