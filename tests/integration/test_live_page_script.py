"""The live page in a real browser, over a scripted cluster. No engine.

test_live_page.py looks at a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import chromium, look
from tests.support.live_script import DRAINING, EVIL, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE = "/pullfill/ui"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as served:
        yield served + PAGE


@pytest.mark.essential
def test_the_page_shows_a_cluster_and_runs_no_text_of_requests(browser: Browser, url: str) -> None:
    with look(browser, url) as found:
        page = found.page
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
    with look(browser, url) as found:
        page = found.page
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
