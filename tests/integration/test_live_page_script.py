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


def test_a_request_opens_its_waterfall_and_a_worker_its_history(browser: Browser, url: str) -> None:
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
        assert page.locator("dialog svg path.line").count() >= 4
        assert "drains" in page.locator("dialog").inner_text()
        page.locator("dialog button", has_text="Close").click()


def test_charts_show_what_was_sent_and_are_read_with_the_keyboard(
    browser: Browser, url: str
) -> None:
    with look(browser, url) as found:
        page = found.page
        page.wait_for_selector("#charts path.line")
        sent, lines = page.evaluate(LINES)
        seconds = sent.get("seconds", 5)
        kv = max(v[0] for name, v in sent["workers"].items() if name.startswith("decode"))
        assert lines == [
            [*sent["ttft_ms"]], [*sent["itl_ms"]], [sent["tokens_per_s"]],
            [sent["done"] / seconds, sent.get("good", 0) / seconds], [sent["backlog_s"]], [kv],
        ]  # fmt: skip
        chart = page.locator("#charts svg").first
        chart.focus()
        page.keyboard.press("PageUp")
        page.keyboard.press("ArrowLeft")
        assert " at " in str(chart.get_attribute("aria-label"))
        assert page.locator("#charts line.cursor").count() == 6, "one cursor for all"
        page.keyboard.press("Escape")
        assert " at " not in str(chart.get_attribute("aria-label"))
        kinds = chart.locator("rect").evaluate_all("all => all.map(e => e.getAttribute('class'))")
        assert kinds == ["m-outage", "m-joined", "m-drain"]
        page.keyboard.press("p")
        assert page.locator("#link").inner_text() == "paused"


LINES = """() => {
  const point = window.pullfill.memory.points().findLast((one) => one.ttft_ms && one.itl_ms);
  const { charts } = window.pullfill;
  return [point, charts.map((chart) => chart.lines.map((line) => line.pick(point)))];
}"""
