"""Actions by clicks and by keyboard: who may do them, and what reaches the node."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from edgepipe.daemon.machine.data_dir import socket_path
from edgepipe.link.admin_client import admin_at
from tests.support.daemon.admin_server import answering
from tests.support.daemon.managed_node import ManagedNode
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving
from tests.support.page.browsing import CHROMIUM, NEEDS_CHROMIUM, open_page, serious_findings, shown_cluster

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=NEEDS_CHROMIUM),
    pytest.mark.asyncio(loop_scope="module"),
]

PLAN = {
    "one_chat_tokens_per_s": 41.5,
    "many_chats_tokens_per_s": 200.0,
    "many_chats": 16,
    "first_token_s": 0.4,
    "first_token_prompt_tokens": 1024,
    "stages": [{"node": "gamer", "layers": "0-35", "weight_bytes": 5 << 30}],
    "left_out": [],
    "kv_tokens": 90000,
    "bottleneck": "stage 0",
    "source": "estimated",
    "note": "",
}
FINDINGS = {
    "findings": [{"id": "wall", "level": "problem", "what": "a firewall", "fact": "", "remedy": "sudo ufw allow"}]
}
FITS = [{"model": "qwen3-4b:q4_k_m", "size_bytes": 2 << 30, "fits": "gamer", "tokens_per_s": 205.0}]
PLANNED = "plan qwen3-8b:q4_k_m"
LIST = [{"model": "org/half", "pull": "interrupted", "fits": None, "size_bytes": 1 << 30, "problem": ""}]

PAGES = (
    ("Home", "svg.ring"),
    ("Chat", ".composer"),
    ("Models", "#fits"),
    ("Requests", "#newest"),
    ("Machines", ".cards > li:has-text('attic')"),
    ("Connect", "section pre"),
)
# Numbers the controls of a page that a person can use, and returns how many there are.
NUMBER_CONTROLS = """() => {
  const kinds = "main :is(a[href], button, input, select, textarea, summary, [tabindex='0'])";
  const controls = [...document.querySelectorAll(kinds)].filter((each) => !each.disabled && each.checkVisibility());
  controls.forEach((each, index) => each.setAttribute("data-number", index));
  return controls.length;
}"""
HAS_FOCUS = """([selector, text]) => {
  const { activeElement: on } = document;
  return on.matches(selector) && (text === "" || on.textContent === text);
}"""
# The number of the control with the focus, and whether its focus is seen.
FOCUSED = """() => {
  const { activeElement: on } = document;
  const style = getComputedStyle(on);
  const number = on.closest("main") ? on.getAttribute("data-number") ?? "new" : null;
  return [number, style.outlineStyle !== "none" || style.boxShadow !== "none"];
}"""


@dataclass
class Managed:
    """A gateway, and the node behind it."""

    served: Served
    node: ManagedNode
    engine: FakeEngine

    def address(self) -> str:
        return f"#ticket={self.node.tickets.issue()}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def managed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Managed]:
    folder, node, engine = tmp_path_factory.mktemp("node"), ManagedNode(), FakeEngine(hold_after=3)
    for kind, result in (("plan", PLAN), ("doctor", FINDINGS), ("fits", FITS), ("list", LIST)):
        node.results[kind] = json.dumps(result).encode()
    with answering(folder, node):
        async with (
            admin_at(str(socket_path(folder)), role="gateway") as admin,
            serving(engine, admin=admin, change=shown_cluster) as served,
        ):
            yield Managed(served, node, engine)
        node.ended.set()


async def test_models_are_pulled_served_and_removed(browser: Any, managed: Managed) -> None:
    page, problems = await open_page(browser, managed.served, managed.address())
    await page.wait_for_selector("header .state:has-text('may manage')")
    assert "ticket" not in page.url
    assert await page.context.cookies() == []
    await page.click("nav a:has-text('Models')")
    await page.wait_for_selector("#fits")
    managed.node.asked.clear()
    await page.fill("#name", "qwen3:8b")
    await page.keyboard.press("Enter")
    await page.click("button[aria-label='Cancel Pull qwen3:8b']")
    await page.click("button[aria-label='Resume the pull of qwen3:8b']")
    await page.click("section:has(#begun) button:has-text('Delete')")
    card = page.locator(".cards > li", has_text="qwen3-8b:q4_k_m")
    await card.locator("button:has-text('Serve …')").click()
    await card.locator(".preview:has-text('41.5 tokens/s')").wait_for()
    await card.get_by_label("KV cache").select_option("8bit")
    await card.get_by_label("Context, in tokens").fill("4096")
    await card.get_by_label("Drafts of tokens").select_option("off")
    await card.locator("button:has-text('Serve qwen3-8b:q4_k_m'):enabled").click()
    await page.wait_for_selector(".tasks li:has-text('Load qwen3-8b:q4_k_m')")
    tiny = page.locator(".cards > li", has_text="tiny")
    await tiny.locator("button:has-text('Stop')").click()
    await tiny.locator("button:has-text('Remove')").press("Enter")
    await page.wait_for_function("document.activeElement.textContent === 'Yes'")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".tasks li:has-text('Remove tiny')")
    asked = [each for each in managed.node.asked if each not in ("list", "fits")]
    plans = [each for each in asked if each.startswith("plan")]
    assert (plans[0], plans[-1]) == (f"{PLANNED} --kv auto", f"{PLANNED} --kv 8bit --context 4096")
    assert [each for each in asked if not each.startswith(("cancel", "plan"))] == [
        "pull qwen3:8b",
        "pull qwen3:8b",
        "remove org/half",
        "serve qwen3-8b:q4_k_m --progress --kv 8bit --context 4096 --draft off",
        "remove tiny",
    ]
    assert managed.node.stopped == ["tiny"]
    assert problems == []


async def test_a_machine_joins_by_clicks_and_others_are_managed(browser: Any, managed: Managed) -> None:
    page, problems = await open_page(browser, managed.served, managed.address())
    await page.wait_for_selector("header .state")
    await page.click("nav a:has-text('Machines')")
    managed.node.asked.clear()
    await page.click("button:has-text('Invite a machine')")
    await page.wait_for_selector("pre:has-text('edgepipe node join 4-crossover-clockwork')")
    await page.click("[role=alertdialog]:has-text('laptop') button:has-text('Let it join')")
    await page.wait_for_selector("p:has-text('laptop joined as member')")
    await page.click("button:has-text('Measure')")
    await page.wait_for_selector("table.matrix")
    await page.click("button:has-text('Check this machine')")
    await page.wait_for_selector(".findings li.problem:has-text('sudo ufw allow')")
    away = page.locator(".cards > li", has_text="attic")
    await away.locator("button:has-text('Promote')").click()
    await away.locator("button:has-text('Yes')").click()
    await away.locator("button:has-text('Remove')").click()
    await away.locator("button:has-text('No')").click()
    await page.click("section:has(#log) button:has-text('Show')")
    await page.wait_for_selector("pre.log:has-text('<b>bold</b>')")
    assert await page.locator("pre.log b").count() == 0
    assert managed.node.asked == ["invite", "answer True", "measure", "doctor", "promote node-4"]
    assert problems == []


async def test_a_request_is_shown_and_cancelled(browser: Any, managed: Managed) -> None:
    page, problems = await open_page(browser, managed.served, managed.address())
    await page.wait_for_selector("header .state")
    await page.click("nav a:has-text('Chat')")
    await page.fill("textarea[aria-label=Message]", "hi")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".message.assistant")
    await page.click("nav a:has-text('Requests')")
    row = page.locator("table.requests tbody tr").first
    await row.locator("td:has-text('answer')").wait_for()
    await row.locator("button:has-text('Cancel')").click()
    await row.locator("td:has-text('cluster_error')").wait_for()
    await page.click("nav a:has-text('Chat')")
    await page.wait_for_selector(".message.assistant:has-text('cancelled')")
    assert problems == []


async def test_each_page_is_reached_and_used_by_the_keyboard_alone(browser: Any, managed: Managed) -> None:
    page, problems = await open_page(browser, managed.served, managed.address())
    await page.wait_for_selector("header .state:has-text('may manage')")
    for title, wait in PAGES:
        await focus(page, "nav a", title)
        await page.keyboard.press("Enter")
        await page.wait_for_selector(wait)
        await page.wait_for_function("title => document.title.startsWith(title)", arg=title)
        controls = await page.evaluate(NUMBER_CONTROLS)
        assert controls > 0, title
        await page.evaluate("document.querySelector('nav a:last-child').focus()")
        reached: set[str] = set()
        for _ in range(4 * controls):
            await page.keyboard.press("Tab")
            number, shown = await page.evaluate(FOCUSED)
            if number is None:
                break
            assert shown, f"{title}: control {number} shows no focus"
            reached |= {number} - {"new"}
        assert len(reached) == controls, f"{title}: the keyboard reaches {sorted(reached)} of {controls} controls"
    await focus(page, "nav a", "Chat")
    await page.keyboard.press("Enter")
    await focus(page, "main textarea[aria-label=Message]", "")
    await page.keyboard.type("hi")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".message.assistant")
    await focus(page, "main button", "Stop")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("button:has-text('Regenerate'), button:has-text('Try again')")
    assert problems == []


async def focus(page: Any, selector: str, text: str) -> None:
    """Press Tab until the focus is on the element."""
    for _ in range(200):
        await page.keyboard.press("Tab")
        if await page.evaluate(HAS_FOCUS, [selector, text]):
            return
    raise AssertionError(f"the keyboard does not reach {selector} {text}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_these_pages_are_narrow_accessible_and_harmless_without_a_session(
    browser: Any, managed: Managed, scheme: str
) -> None:
    options = {"viewport": {"width": 380, "height": 800}, "color_scheme": scheme, "bypass_csp": True}
    page, problems = await open_page(browser, managed.served, "#ticket=used-or-old", **options)
    await page.wait_for_selector(".banner:has-text('edgepipe open')")
    problems.clear()  # the browser reports the 401
    for name, wait in (("models", ".cards li"), ("requests", "#newest"), ("machines", ".cards li")):
        await page.goto(f"{managed.served.http.base_url}/#{name}")
        await page.wait_for_selector(wait)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 380, name
        assert await serious_findings(page) == [], name
        words = "Pull, Stop, Remove, Drain, Promote, Invite a machine, Measure, Cancel".split(", ")
        assert [word for word in words if await page.locator(f"main button:has-text('{word}')").count()] == []
    assert problems == []
