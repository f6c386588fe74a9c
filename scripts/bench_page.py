"""Measures the page with four emulated machines and Chromium: ``scripts/bench page [PART ...]``.

Parts: ``load`` (weight, first view), ``speed`` (tokens/s with a page on Requests and without, in turns), ``killed``
(time until a killed stage is shown), ``typing`` (lag of keys while a long answer grows), ``axe`` (accessibility),
``memory`` (history and request ring), ``install`` (a new user: from a folder of wheels to the first answer). Without
parts: all.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from figures import Row, below, print_rows
from new_user import first_answer
from page_cluster import PageCluster, browser, page_cluster

from edgepipe.gateway.request_ring import MOST_REQUESTS, RequestRecord, RequestRing
from edgepipe.gateway.ui.history import SECONDS, History
from edgepipe.wire.nodes import ClusterView
from tests.support.gateways.fake_engine import FakeEngine, view_of
from tests.support.gateways.server import serving

DEVICES = (("gamer", "rtx4090"), ("studio", "m4max"), ("attic", "rtx3060"), ("laptop", "m4 16gb"))
MODEL = "qwen2.5-32b:q4_k_m"
PAGES = (("home", "svg.ring"), ("chat", ".composer"), ("models", "#disks"), ("requests", "#newest"))
PAGES += (("machines", ".cards"), ("connect", "section pre"))
AXE = Path(__file__).resolve().parent.parent / "tests" / "page" / "node_modules" / "axe-core" / "axe.min.js"
PAIRS = 6
TOKENS = 150
CHATS = 6


async def load(cluster: PageCluster, opened: Any) -> list[Row]:
    """Weight of the page, requests to other hosts, and time to the first full view: median of five new browsers."""
    views: list[float] = []
    sizes: list[int] = []
    foreign = 0
    for _ in range(5):
        page = await (await opened.new_context()).new_page()
        bodies: list[Any] = []
        page.on("requestfinished", partial(_keep, bodies))
        began_s = time.perf_counter()
        await page.goto(cluster.address)
        await page.wait_for_selector("svg.ring .card")
        views.append(time.perf_counter() - began_s)
        foreign += sum(not each.url.startswith(cluster.address) for each in bodies)
        found = [await each.sizes() for each in bodies if "/ui/events" not in each.url]
        sizes.append(sum(each["responseBodySize"] for each in found))
        await page.context.close()
    return [
        below("weight, compressed", max(sizes) / 1e3, "KB", 150),
        below("requests to other hosts", foreign, "", 0),
        below("first full view", statistics.median(views), "s", 1.0),
    ]


def _keep(found: list[Any], request: Any) -> None:
    found.append(request)


async def speed(cluster: PageCluster, opened: Any) -> list[Row]:
    """Tokens per second of the same chats with a page on Requests and without one, in turns."""
    gateway = await _gateway(cluster)
    before_mb = gateway.memory_info().rss / 1e6
    page = await (await opened.new_context()).new_page()
    await page.goto("about:blank")
    ratios: list[float] = []
    for pair in range(PAIRS):
        rates: dict[bool, float] = {}
        for shown in (True, False) if pair % 2 else (False, True):
            await page.goto(f"{cluster.address}#requests" if shown else "about:blank")
            if shown:
                await page.wait_for_selector("#newest")
            began_s = time.perf_counter()
            await asyncio.gather(*(cluster.chat(max_tokens=TOKENS, content=f"{pair} {chat}") for chat in range(CHATS)))
            rates[shown] = CHATS * TOKENS / (time.perf_counter() - began_s)
        ratios.append(rates[True] / rates[False])
    async with cluster.busy(CHATS):
        rate = await _event_rate(cluster)
    more_mb = gateway.memory_info().rss / 1e6 - before_mb
    await page.context.close()
    ratio = statistics.median(ratios)
    return [
        Row("tokens/s with a page on Requests", ratio, "of none", target=">= 0.98", met=ratio >= 0.98),
        below("more memory of the gateway", more_mb, "MB", 30),
        below("events", rate / 1e3, "KB/s", 40),
    ]


async def _gateway(cluster: PageCluster) -> psutil.Process:
    status = await cluster.admin.status()
    return psutil.Process(next(child.pid for child in status.children if child.kind == "gateway"))


async def _event_rate(cluster: PageCluster) -> float:
    """Bytes per second of a stream for Requests, after its first second."""
    count, began_s = 0, 0.0
    async with (
        httpx.AsyncClient(timeout=30, trust_env=False) as http,
        http.stream("GET", f"{cluster.address}ui/events", params={"requests": cluster.model}) as answer,
    ):
        opened_s = time.perf_counter()
        async for piece in answer.aiter_raw():
            now_s = time.perf_counter()
            if now_s - opened_s < 2:
                continue
            began_s = began_s or now_s
            count += len(piece)
            if now_s - began_s > 10:
                return count / (now_s - began_s)
    raise RuntimeError("the stream ended")


async def killed(cluster: PageCluster, opened: Any) -> list[Row]:
    """Time from the gateway's news of a lost stage to the page that shows it."""
    page = await (await opened.new_context()).new_page()
    await page.goto(cluster.address)
    await page.wait_for_selector("svg.ring.ready")
    status = await cluster.admin.status()
    gateway = cluster.nodes[0].plan.name
    lost = next(stage for stage in reversed(status.engines[0].stages) if stage.node_name != gateway)
    process = next(node.process for node in cluster.nodes if node.plan.name == lost.node_name)
    async with (
        cluster.busy(2),
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
        http.stream("GET", f"{cluster.address}ui/events") as answer,
    ):
        await asyncio.sleep(2)
        shown = asyncio.create_task(page.wait_for_selector("svg.ring:not(.ready), .card.lost, .news.warn"))
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        knows_s = 0.0
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not knows_s:
                view = json.loads(line.removeprefix("data: "))
                states = [model["state"] for model in view.get("models", []) if isinstance(model, dict)]
                gone = any(machine["state"] != "alive" for machine in view.get("machines", []))
                if any(state != "ready" for state in states) or gone or view.get("absent"):
                    knows_s = time.perf_counter()
                    await shown
                    break
    await page.context.close()
    return [below("killed stage shown after the gateway knows", max(0.0, time.perf_counter() - knows_s), "s", 1.0)]


async def typing(opened: Any) -> list[Row]:
    """Lag of a key, from its event to the next frame, while an answer of 20,000 tokens grows."""
    words = "The quick brown fox jumps over the lazy dog. **Bold** and `code`.\n\n- item\n\n"
    text = (words * 1000)[:20_000]
    async with serving(FakeEngine(answer=text.encode(), group=20, pause_s=0.02), change=_large_context) as served:
        page = await (await opened.new_context()).new_page()
        await page.goto(f"{served.http.base_url}/#chat")
        await page.wait_for_selector("#model option", state="attached")
        await page.evaluate(
            """() => {
              window.lags = [];
              document.addEventListener("keydown", (event) =>
                requestAnimationFrame(() => window.lags.push(performance.now() - event.timeStamp)), true);
            }"""
        )
        await page.fill("textarea[aria-label=Message]", "go")
        await page.keyboard.press("Enter")
        while not await page.locator(".figures-line").count():
            await page.keyboard.press("a")
            await asyncio.sleep(0.03)
        lags = sorted(await page.evaluate("window.lags"))
        await page.context.close()
    return [below(f"lag of typing, p95 of {len(lags)} keys", lags[int(0.95 * len(lags))], "ms", 50)]


def _large_context(view: ClusterView) -> ClusterView:
    served = view.served[0]
    return replace(view, served=(replace(served, engine=replace(served.engine, context_length=1 << 16)),))


async def axe(cluster: PageCluster, opened: Any) -> list[Row]:
    """Serious findings of axe-core on all pages, in both colour schemes."""
    serious: list[str] = []
    for scheme in ("light", "dark"):
        page = await (await opened.new_context(color_scheme=scheme, bypass_csp=True)).new_page()
        await page.goto(await cluster.ticket())
        for name, wait in PAGES:
            await page.goto(f"{cluster.address}#{name}")
            await page.wait_for_selector(wait)
            await page.add_script_tag(path=str(AXE))
            found = await page.evaluate("axe.run().then((result) => result.violations)")
            serious += [
                f"{name} {scheme} {each['id']}: {each['nodes'][0]['html'][:100]}"
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
        await page.context.close()
    for each in serious:
        print(each)
    return [below("serious findings of axe-core", len(serious), "", 0)]


def memory() -> list[Row]:
    """Bytes of the history of a model and of the request ring, and the share of a second that a sample takes."""
    engine = view_of("127.0.0.1:1").served[0].engine
    tracemalloc.start()
    history, ring = History(), RequestRing()
    for second in range(SECONDS):
        history.sample([replace(engine, tokens_per_s=float(second))])
    for number in range(MOST_REQUESTS):
        ring.add(
            RequestRecord(
                request_id=f"request-{number:016x}",
                model="tiny",
                prompt_tokens=1,
                accepted_wall_s=1.0,
                accepted_s=1.0,
                cancel=print,
            )
        )
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began_s = time.perf_counter()
    for _ in range(1000):
        history.sample([engine])
    share = (time.perf_counter() - began_s) / 1000
    return [
        below("history of a model and request ring", held / 1e6, "MB", 4),
        below("samples, share of a core", share, "", 0.005),
    ]


async def main(parts: list[str]) -> None:
    wanted = parts or ["memory", "typing", "load", "axe", "speed", "killed", "install"]
    if "axe" in wanted and not AXE.exists():
        raise SystemExit("axe-core is not installed: run scripts/check_page once")
    rows: list[Row] = memory() if "memory" in wanted else []
    async with browser() as opened:
        if "typing" in wanted:
            rows += await typing(opened)
        if {"load", "axe", "speed", "killed"} & {*wanted}:
            async with page_cluster(DEVICES, MODEL) as cluster:
                for name, part in (("load", load), ("axe", axe), ("speed", speed), ("killed", killed)):
                    if name in wanted:
                        rows += await part(cluster, opened)
        if "install" in wanted:
            rows += await first_answer(opened)
    print_rows("page", rows)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
