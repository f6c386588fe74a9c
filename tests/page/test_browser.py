"""The page in a real browser, under its own policy: no violation, no error, and nothing of an answer becomes markup."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edgepipe.errors import StageLost
from edgepipe.gateway.access import AccessRules
from edgepipe.ids import NodeId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.engines import StageState
from edgepipe.wire.nodes import AbsentNode, ClusterView, DeviceState, MemberState, NodeState
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = "<img src=x onerror=document.title='bad'>"
ANSWER = (
    f"# Title\n\n{HOSTILE} [bad](javascript:alert(1)) [good](https://example.org) ![pic](https://example.org/a.png)\n\n"
    "```py\nprint(1)\n```\n\n<script>document.title='bad'</script>"
)
KEY = "ep-a-long-enough-key"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as running:
        opened = await running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def browser(chromium: Any) -> AsyncIterator[Any]:
    """The browser; its pages close with the test, so that they ask no further."""
    yield chromium
    for context in chromium.contexts:
        await context.close()


async def _page(browser: Any, served: Served, path: str = "", **options: Any) -> tuple[Any, list[str]]:
    """Open the page. The list gets every error, refused request and violation of the policy."""
    page = await (await browser.new_context(**options)).new_page()
    page.set_default_timeout(60_000)  # a busy machine starts a page slowly
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on(
        "request", lambda request: None if served.http.base_url.host in request.url else problems.append(request.url)
    )
    await page.goto(f"{served.http.base_url}/{path}")
    return page, problems


def _cluster(view: ClusterView, *, lost: bool = False) -> ClusterView:
    """Four machines, the last one outside the ring; ``lost``: the third has gone."""
    names = ["gamer", "studio", "laptop", HOSTILE]
    members = tuple(
        MemberState(
            node=NodeState(
                node_id=NodeId(name), name=name, devices=(DeviceState(reserved_bytes=8 << 30, free_bytes=4 << 30),)
            ),
            state="alive",
            self=index == 0,
        )
        for index, name in enumerate(names)
        if not (lost and name == "laptop")
    )
    stages = tuple(
        StageState(
            node_id=NodeId(name),
            node_name=name,
            weight_bytes=5 << 30,
            kv_bytes=2 << 30,
            busy=0.4,
            step_ms=24,
            one_way_ms=0.4,
            slices=(Slice(index=index, layers=LayerRange(10 * index, 10 * index + 10), embedding=False, head=False),),
        )
        for index, name in enumerate(names[:3])
    )
    served = view.served[0]
    engine = replace(
        served.engine,
        stages=stages,
        num_blocks=100,
        free_blocks=50,
        bottleneck="stage 1",
        micro_batches=3,
        why="1 per stage",
        state="recovering" if lost else "ready",
        error=StageLost("laptop is gone") if lost else None,
    )
    absent = (AbsentNode(node_id=NodeId("laptop"), name="laptop", state="dead", since_us=1),) if lost else ()
    return replace(view, members=members, absent=absent, served=(replace(served, engine=engine),))


async def test_home_shows_the_ring_and_a_machine_that_dies(browser: Any) -> None:
    views: list[ClusterView] = []

    def change(view: ClusterView) -> ClusterView:
        views.append(view)
        return _cluster(view)

    async with serving(FakeEngine(), change=change) as served:
        page, problems = await _page(browser, served)
        ring = page.locator("svg.ring")
        await ring.wait_for()
        assert await ring.locator(".card").count() == 3
        text = await ring.text_content()
        assert all(words in text for words in ("gamer", "layers 10-19", "busy 40 %", "slowest"))
        assert HOSTILE in await page.locator(".cards h3").inner_text()
        await page.click("summary:has-text('Ring as a table')")
        assert "studio" in await page.locator(".twin[open] table").inner_text()
        served.gateway.update(_cluster(views[0], lost=True))
        await page.wait_for_selector(".news:has-text('laptop is gone')", timeout=60_000)
        await page.wait_for_selector(".card.lost")
        assert await page.title() == "Home · edgepipe"
        assert problems == []


async def test_an_answer_in_chat_is_shown_as_text_and_its_chat_survives(browser: Any) -> None:
    async with serving(FakeEngine(answer=ANSWER.encode(), group=16), change=_cluster) as served:
        page, problems = await _page(browser, served, "#chat")
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
        page, problems = await _page(browser, served, "#chat")
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
    async with serving(FakeEngine(), rules=rules, change=_cluster) as served:
        page, _ = await _page(browser, served)
        await page.fill("#key", KEY)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("svg.ring")
        assert await page.context.cookies() == []
        served.answering.cancel()
        await page.wait_for_selector(".banner")
        assert await page.locator("svg.ring").count() == 1, "the last state stays"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_pages_fit_narrow_screens_and_are_accessible(browser: Any, scheme: str) -> None:
    async with serving(FakeEngine(), change=_cluster) as served:
        options = {"viewport": {"width": 380, "height": 800}, "color_scheme": scheme, "bypass_csp": True}
        page, problems = await _page(browser, served, **options)
        for name, wait in (("home", "svg.ring"), ("chat", ".composer"), ("connect", "section pre")):
            await page.goto(f"{served.http.base_url}/#{name}")
            await page.wait_for_selector(wait)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 380, name
            if AXE.exists():  # scripts/check_page fetches it
                await page.add_script_tag(path=AXE)
                found = await page.evaluate("axe.run().then((result) => result.violations)")
                serious = [
                    (each["id"], [node["html"] for node in each["nodes"]])
                    for each in found
                    if each["impact"] in ("serious", "critical")
                ]
                assert serious == [], name
        assert problems == []
