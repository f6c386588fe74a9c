"""The page in a real browser, under its own policy: no violation, no error, and nothing of an answer becomes markup."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edgepipe.gateway.access import AccessRules
from edgepipe.wire.nodes import ClusterView
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import serving
from tests.support.page.browsing import CHROMIUM, HOSTILE, NEEDS_CHROMIUM, open_page, serious_findings, shown_cluster

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=NEEDS_CHROMIUM),
    pytest.mark.asyncio(loop_scope="module"),
]

ANSWER = (
    f"# Title\n\n{HOSTILE} [bad](javascript:alert(1)) [good](https://example.org) ![pic](https://example.org/a.png)\n\n"
    "```py\nprint(1)\n```\n\n<script>document.title='bad'</script>"
)
KEY = "ep-a-long-enough-key"


async def test_home_shows_the_ring_and_a_machine_that_dies(browser: Any) -> None:
    views: list[ClusterView] = []

    def change(view: ClusterView) -> ClusterView:
        views.append(view)
        return shown_cluster(view)

    async with serving(FakeEngine(), change=change) as served:
        page, problems = await open_page(browser, served)
        ring = page.locator("svg.ring")
        await ring.wait_for()
        assert await ring.locator(".card").count() == 3
        text = await ring.text_content()
        assert all(words in text for words in ("gamer", "layers 10-19", "busy 40 %", "slowest"))
        assert HOSTILE in await page.locator(".cards h3").inner_text()
        await page.click("summary:has-text('Ring as a table')")
        assert "studio" in await page.locator(".twin[open] table").inner_text()
        served.gateway.update(shown_cluster(views[0], lost=True))
        await page.wait_for_selector(".news:has-text('laptop is gone')", timeout=60_000)
        await page.wait_for_selector(".card.lost")
        assert await page.title() == "Home · edgepipe"
        assert problems == []


async def test_an_answer_in_chat_is_shown_as_text_and_its_chat_survives(browser: Any) -> None:
    async with serving(FakeEngine(answer=ANSWER.encode(), group=16), change=shown_cluster) as served:
        page, problems = await open_page(browser, served, "#chat")
        await page.wait_for_selector("#model option:has-text('tiny')", state="attached")
        await page.keyboard.press("Tab")  # the skip link is the first stop of the keyboard
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.locator("textarea[aria-label=Message]").press_sequentially("hi")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".figures-line:has-text('computed by gamer (layers 0-9)')")
        answer = page.locator(".message.assistant")
        text = await answer.inner_text()
        assert all(part in text for part in (HOSTILE, "<script>", "[bad](javascript:alert(1))"))
        assert await answer.locator("img, script").count() == 0
        assert await answer.locator("a").evaluate_all("links => links.map((link) => link.href)") == [
            "https://example.org/"
        ]
        assert await answer.locator("pre").inner_text() == "print(1)"
        await page.reload()
        await page.click(".chats .title")
        await page.wait_for_selector(".message.assistant")
        assert await page.title() == "Chat · edgepipe"
        assert problems == []


async def test_an_answer_can_be_stopped_and_the_engine_stops_too(browser: Any) -> None:
    engine = FakeEngine(hold_after=5)
    async with serving(engine) as served:
        page, problems = await open_page(browser, served, "#chat")
        await page.wait_for_selector("#model option:has-text('tiny')", state="attached")
        await page.fill("textarea[aria-label=Message]", "hi")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".message.assistant:has-text('The c')")
        await page.click("button:has-text('Stop')")
        async with asyncio.timeout(30):
            await engine.cancelled.wait()
        await page.wait_for_selector("button:has-text('Regenerate'), button:has-text('Try again')")
        assert problems == []


async def test_the_page_asks_for_a_key_and_says_when_the_node_is_away(browser: Any) -> None:
    rules = AccessRules.of(keys=(KEY,), key_on_loopback=True)
    async with serving(FakeEngine(), rules=rules, change=shown_cluster) as served:
        page, _ = await open_page(browser, served)
        await page.fill("#key", KEY)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("svg.ring")
        assert await page.context.cookies() == []
        served.answering.cancel()
        await page.wait_for_selector(".banner")
        assert await page.locator("svg.ring").count() == 1, "the last state stays"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_pages_fit_narrow_screens_and_are_accessible(browser: Any, scheme: str) -> None:
    async with serving(FakeEngine(), change=shown_cluster) as served:
        options = {"viewport": {"width": 380, "height": 800}, "color_scheme": scheme, "bypass_csp": True}
        page, problems = await open_page(browser, served, **options)
        for name, wait in (("home", "svg.ring"), ("chat", ".composer"), ("connect", "section pre")):
            await page.goto(f"{served.http.base_url}/#{name}")
            await page.wait_for_selector(wait)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 380, name
            assert await serious_findings(page) == [], name
        assert problems == []
