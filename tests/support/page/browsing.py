"""Pages of a gateway in Chromium, and the cluster that they show."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgepipe.errors import StageLost
from edgepipe.ids import NodeId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.engines import StageState
from edgepipe.wire.nodes import AbsentNode, ClusterView, DeviceState, MemberState, ModelOnDisk, NodeState
from tests.support.gateways.server import Served

CHROMIUM = shutil.which("chromium")
NEEDS_CHROMIUM = "chromium is not installed: apt-get install chromium"
HOSTILE = "<img src=x onerror=document.title='bad'>"
_AXE = Path(__file__).parents[2] / "page" / "node_modules" / "axe-core" / "axe.min.js"
_WHOLE = (LayerRange(0, 30),)


async def open_page(browser: Any, served: Served, path: str = "", **options: Any) -> tuple[Any, list[str]]:
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


async def serious_findings(page: Any) -> list[tuple[str, list[str]]]:
    """Return what axe-core finds serious; nothing where ``scripts/check_page`` has not fetched it."""
    if not _AXE.exists():
        return []
    await page.add_script_tag(path=_AXE)
    found = await page.evaluate("axe.run().then((result) => result.violations)")
    return [
        (each["id"], [node["html"] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


def shown_cluster(view: ClusterView, *, lost: bool = False) -> ClusterView:
    """Four machines, the last one outside the ring; ``lost``: the third has gone."""
    names = ["gamer", "studio", "laptop", HOSTILE]
    members = tuple(
        MemberState(
            node=NodeState(
                node_id=NodeId(name),
                name=name,
                edgepipe_version="0.1.0",
                devices=(DeviceState(reserved_bytes=8 << 30, free_bytes=4 << 30),),
                models=_disk(index),
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


def _disk(index: int) -> tuple[ModelOnDisk, ...]:
    """Return what is on the disk of a machine: a served model everywhere, another one on the first machine alone."""
    tiny = ModelOnDisk(model="tiny", manifest_hash="a" * 64, num_bytes=5 << 30, complete=True, parts=_WHOLE)
    other = ModelOnDisk(model="qwen3-8b:q4_k_m", manifest_hash="b" * 64, num_bytes=5 << 30, complete=True, parts=_WHOLE)
    return (tiny, other) if index == 0 else (tiny,)
