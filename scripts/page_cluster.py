"""Emulated machines with people's names that serve a model, and a browser on their page: for pictures and the bench."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from edgepipe.cli.admin import connect
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, StartedNode, local_cluster, wait_until_joined
from edgepipe.cli.serve import serve_request
from edgepipe.link.admin_client import Admin
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import SMALLEST_VOCAB, write_model_folder
from edgepipe.weights.mixes import named_model, split_mix

CHROMIUM = shutil.which("chromium") or "chromium"
_JOIN_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCluster:
    """A running cluster."""

    nodes: Sequence[StartedNode]
    admin: Admin  # the first node
    model: str

    @property
    def address(self) -> str:
        """The page of the first node."""
        return f"http://127.0.0.1:{self.nodes[0].http_port}/"

    async def ticket(self) -> str:
        """Return the address that ``edgepipe open`` opens."""
        return f"{self.address}#ticket={await self.admin.issue_ticket()}"

    async def chat(self, *, max_tokens: int, content: str = "Tell a story.") -> float:
        """Ask for one answer. Return its length in seconds."""
        began_s = asyncio.get_running_loop().time()
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            answer = await http.post(f"{self.address}v1/chat/completions", json=body)
            answer.raise_for_status()
        return asyncio.get_running_loop().time() - began_s

    @asynccontextmanager
    async def busy(self, count: int, *, max_tokens: int = 400) -> AsyncGenerator[None]:
        """Keep ``count`` chats going inside the block."""

        async def again(number: int) -> None:
            while True:
                await self.chat(max_tokens=max_tokens, content=f"{number} " + "Tell a long story. " * 30)

        tasks = [asyncio.create_task(again(number)) for number in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def page_cluster(
    devices: Sequence[tuple[str, str]],
    model: str,
    *,
    link: str = "1gbit,0.3ms",
    others: Sequence[str] = (),
    plan: str = "",
) -> AsyncGenerator[PageCluster]:
    """Serve ``model`` on emulated machines: pairs of a name and a device.

    others  more models on the disk
    plan    layers by machine; empty: the planner uses all machines
    """
    folder = Path(tempfile.mkdtemp(prefix="edgepipe-page-"))
    try:
        for name in (model, *others):
            _store(folder / "models", folder / name.replace(":", "-"), name)
        machines = LocalCluster(
            cluster=f"page-{secrets.token_hex(4)}",
            nodes=[NodeToStart(name=name, backend="emulated", device=device) for name, device in devices],
            models_dir=folder / "models",
            threads=1,
            backend_options=["jitter=0.05", f"as_model={model}"],
            link=link,
        )
        async with AsyncExitStack() as stack:
            nodes = await stack.enter_async_context(local_cluster(machines))
            admin = await stack.enter_async_context(connect(nodes[0].data_dir))
            if await wait_until_joined(admin, num_nodes=len(nodes), timeout_s=_JOIN_S) is None:
                raise RuntimeError("the nodes did not find each other")
            served = model.replace(":", "-")
            async for _ in admin.serve(serve_request(served, plan=plan, nodes=0 if plan else len(nodes))):
                pass
            yield PageCluster(nodes=nodes, admin=admin, model=served)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def _store(models_dir: Path, source: Path, model: str) -> None:
    config, _ = named_model(model)
    write_model_folder(source, replace(config, vocab_size=SMALLEST_VOCAB), mix=split_mix(model)[1])
    ModelStore(models_dir).pull(str(source))


@asynccontextmanager
async def browser() -> AsyncGenerator[Any]:
    """A headless Chromium."""
    from playwright.async_api import async_playwright

    async with async_playwright() as running:
        opened = await running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        await opened.close()
