"""One Chromium for a file of tests. Without it the tests are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.page.browsing import CHROMIUM

playwright = pytest.importorskip("playwright.async_api")


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
