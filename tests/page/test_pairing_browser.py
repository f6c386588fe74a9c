"""A second real node joins by clicks on the first one's page, and is shown there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgepipe.cli.admin import connect
from tests.support.page.browsing import CHROMIUM, NEEDS_CHROMIUM
from tests.support.processes.bad_input import Shell

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=NEEDS_CHROMIUM),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.mark.long
async def test_a_second_machine_joins_by_clicks(browser: Any, tmp_path: Path) -> None:
    host, other = Shell(tmp_path / "host"), Shell(tmp_path / "other")
    with host.node("--name", "studio", "--cluster", "attic") as node:
        async with connect(host.data_dir) as admin:
            ticket = await admin.issue_ticket()
        page = await (await browser.new_context()).new_page()
        page.set_default_timeout(60_000)
        await page.goto(f"{node.url}/#ticket={ticket}")
        await page.wait_for_selector("header .state:has-text('may manage')")
        await page.click("nav a:has-text('Machines')")
        await page.click("button:has-text('Invite a machine')")
        text = await page.locator("section:has(#invite)").filter(has_text="--host").inner_text()
        found = re.search(r"--host (\S+) ([\w-]+)", text)
        assert found, text
        join = ("node", "join", "--host", found[1], found[2], "--name", "laptop")
        joining = asyncio.create_task(asyncio.to_thread(other.run, *join))
        dialog = page.locator("[role=alertdialog]", has_text="laptop")
        await dialog.locator("button:has-text('Let it join')").click()
        joined = await joining
        assert joined.returncode == 0, joined.stderr
        await page.wait_for_selector("p:has-text('laptop joined as owner')")
        with other.node("--name", "laptop", "--peer", node.address):
            card = page.locator("main .cards > li", has_text="laptop")
            await card.filter(has_text="round trip").wait_for()
            async with httpx.AsyncClient(trust_env=False, verify=False) as http:
                peers = (await http.get(f"{node.url}/ui/peers")).json()
            assert {peer["name"]: peer["role"] for peer in peers["peers"]} == {"studio": "owner", "laptop": "owner"}
