"""``edgepipe demo``: a whole cluster on this machine in one command."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import string
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgepipe.cli.options import DataDir, ModelsDir, models_dir_of
from edgepipe.cli.output import make_console
from edgepipe.errors import ClusterError, ConfigInvalid, FeatureMissing, ModelUnknown, NoPeersFound, PlanInvalid
from edgepipe.safe_text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from edgepipe.cli.local_cluster import LocalCluster, StartedNode
    from edgepipe.link.admin_client import Admin
    from edgepipe.wire.engines import EngineState
    from edgepipe.wire.nodes import ClusterStatus

_QUESTION = "What is the capital of France?"
_JOIN_S = 60.0  # measuring two devices on a busy machine
_MAX_NODES = 8


def demo(
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=_MAX_NODES, help="How many nodes to start.")
    ] = 2,
    backends: Annotated[
        str,
        typer.Option(
            "--backends",
            metavar="BACKENDS",
            help="Backend of each node, such as torch,mlx. A shorter list repeats.",
            show_default=False,
        ),
    ] = "",
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Model to serve; fetched if it is not on this disk.")
    ] = "demo",
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Question for the model.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer in tokens.")] = 64,
    serve: Annotated[bool, typer.Option("--serve", help="Stay up and answer HTTP until ^C.")] = False,
    http_port: Annotated[
        int, typer.Option("--http-port", metavar="PORT", min=0, max=65535, help="Port of the API; 0: any free port.")
    ] = 0,
    backend_option: Annotated[
        list[str] | None,
        typer.Option("--backend-option", metavar="KEY=VALUE", help="Option of the backends; repeatable."),
    ] = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Try a whole cluster on this machine. Starts nodes, loads a model, answers, stops."""
    from edgepipe.cli.local_cluster import LocalCluster, NodeToStart

    if serve and prompt is not None:
        raise ConfigInvalid("--prompt and --serve contradict each other", next_step="give one of them")
    chosen = choose_backends(backends, nodes)
    plan = LocalCluster(
        cluster=f"demo-{secrets.token_hex(4)}",
        nodes=[
            NodeToStart(
                name=string.ascii_lowercase[i],
                backend=backend,
                http_port=http_port if i == 0 else 0,
                backend_options=_options_here(backend),
            )
            for i, backend in enumerate(chosen)
        ],
        models_dir=models_dir_of(data_dir, models_dir),
        threads=max(1, (os.cpu_count() or 1) // nodes),
        backend_options=backend_option or (),
    )
    model = _fetch(plan.models_dir, model)
    status = asyncio.run(_until_signal(_Demo(plan, model).run(prompt or _QUESTION, max_tokens, serve=serve), serve))
    if status:
        raise typer.Exit(status)


def _options_here(backend: str) -> tuple[str, ...]:
    """Return a backend's own options. MLX without a Mac's GPU computes faster with widened weights."""
    return ("weights=wide",) if backend == "mlx" and sys.platform != "darwin" else ()


def choose_backends(text: str, num_nodes: int) -> list[str]:
    """Return one backend per node: the named ones, else the installed ones. Raises ConfigInvalid, FeatureMissing."""
    names = [name.strip() for name in text.split(",") if name.strip()] if text else _installed()
    if len(names) > num_nodes:
        names = names[:num_nodes] if not text else names
    if not names:
        raise FeatureMissing(
            "no backend is installed that can run a model",
            fact="neither torch nor mlx is installed",
            next_step="edgepipe update --extra torch    (or mlx on a Mac)",
        )
    if len(names) > num_nodes:
        raise ConfigInvalid(
            f"{len(names)} backends for {num_nodes} nodes", next_step=f"--nodes {len(names)}, or name fewer backends"
        )
    return [names[index % len(names)] for index in range(num_nodes)]


def even_layers(num_layers: int, names: Sequence[str]) -> str:
    """Divide the layers equally, in the form of ``serve --plan``. No measuring: all nodes share this machine.

    Raises PlanInvalid for fewer layers than nodes.
    """
    from edgepipe.spec.facts import LayerRange

    if num_layers < len(names):
        raise PlanInvalid(
            f"{num_layers} layers cannot be divided among {len(names)} nodes", next_step="use fewer nodes"
        )
    bounds = [num_layers * index // len(names) for index in range(len(names) + 1)]
    return ",".join(f"{name}:{LayerRange(*ends)}" for name, ends in zip(names, pairwise(bounds), strict=True))


def _installed() -> list[str]:
    """Return the backends whose library is installed, without an import."""
    return [name for name, library in (("torch", "torch"), ("mlx", "mlx")) if find_spec(library) is not None]


def _fetch(models_dir: Path, model: str) -> str:
    """Pull the model unless this disk has it; return its name there."""
    from edgepipe.cli.models import pull_model
    from edgepipe.store.store import ModelStore

    store = ModelStore(models_dir)
    try:
        model_id = store.meant(model)
    except ModelUnknown:
        return pull_model(models_dir, model).model_id
    return pull_model(models_dir, model_id).model_id if store.resolve(model_id).problem else model_id


async def _until_signal(work: Coroutine[Any, Any, None], serve: bool) -> int:
    """Run the demo; SIGINT and SIGTERM end it in order. Return the exit code: 0, or 128 + signal if interrupted."""
    task = asyncio.ensure_future(work)
    caught: list[int] = []
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    with suppress(asyncio.CancelledError):
        await task
    return 0 if not caught or serve else 128 + caught[0]


class _Demo:
    """One run; prints each step on stdout."""

    def __init__(self, plan: LocalCluster, model: str) -> None:
        self._plan = plan
        self._model = model
        self._console: Console = make_console()
        self._step_started = time.monotonic()

    async def run(self, prompt: str, max_tokens: int, *, serve: bool) -> None:
        """Start, join, load, answer (or stay up), stop."""
        from edgepipe.cli.admin import connect
        from edgepipe.cli.local_cluster import local_cluster

        count = len(self._plan.nodes)
        self._say(f"edgepipe demo · cluster {self._plan.cluster} · {count} nodes on 127.0.0.1", style="bold")
        try:
            async with local_cluster(self._plan) as nodes:
                self._done(f"{count} node processes started")
                async with connect(nodes[0].data_dir) as admin:
                    self._show_nodes(await self._join(admin))
                    engine = await self._serve(admin)
                try:
                    if serve:
                        await self._stay(nodes[0])
                    else:
                        await self._answer(nodes[0], engine, prompt, max_tokens)
                finally:
                    self._step_started = time.monotonic()
        finally:
            self._done("all stopped, nothing left behind")

    async def _join(self, admin: Admin) -> ClusterStatus:
        from edgepipe.cli.local_cluster import wait_until_joined

        status = await wait_until_joined(admin, num_nodes=len(self._plan.nodes), timeout_s=_JOIN_S)
        if status is None:
            seen = await admin.status()
            alive = [member.node.name for member in seen.members if member.state == "alive"]
            raise NoPeersFound(
                "the nodes did not find each other",
                fact=f"after {_JOIN_S:.0f} s node '{self._plan.nodes[0].name}' sees {', '.join(alive)}; "
                "mDNS on 127.0.0.1 may be blocked",
                next_step="start nodes by hand: edgepipe node start --peer HOST:PORT",
            )
        self._done("they found each other by mDNS and measured their devices")
        return status

    def _show_nodes(self, status: ClusterStatus) -> None:
        from edgepipe.units import format_bytes

        for member in sorted(status.members, key=lambda member: member.node.name):
            for device in member.node.devices:
                if device.error is not None and device.state == "failed":
                    raise ClusterError(
                        f"node '{member.node.name}' cannot compute: {device.error.what}",
                        fact=device.error.fact,
                        next_step=device.error.next_step,
                    )
                if (profile := device.profile) is not None:
                    device_name = f"{profile.backend} {profile.device}"
                    room = f"{format_bytes(device.free_bytes)} free"
                    self._say(f"      {member.node.name}  {device_name:<14} {profile.compute_dtype:<9} {room}")

    async def _serve(self, admin: Admin) -> EngineState:
        from edgepipe.cli.serve import describe_stages, serve_request, serve_with_progress
        from edgepipe.store.store import ModelStore

        num_layers = ModelStore(self._plan.models_dir).resolve(self._model).config.num_layers
        plan = even_layers(num_layers, [node.name for node in self._plan.nodes])
        (engine,) = await serve_with_progress(admin, serve_request(self._model, plan=plan))
        self._done(f"{engine.model}: {describe_stages(engine)}")
        return engine

    async def _answer(self, node: StartedNode, engine: EngineState, prompt: str, max_tokens: int) -> None:
        from edgepipe.cli.chat.answer_view import PlainView
        from edgepipe.cli.chat.conversation import PartialAnswer, print_footer, stream_answer
        from edgepipe.cli.find import Target
        from edgepipe.cli.sse import ChatClient
        from edgepipe.daemon.machine.http_keys import read_key

        self._say("\n>>> " + visible(prompt, keep="\n"), style="bold")
        target = Target(
            base_url=f"http://127.0.0.1:{node.http_port}",
            model=engine.model,
            num_nodes=len(engine.stages),
            api_key=read_key(node.data_dir),
        )
        messages = [{"role": "user", "content": prompt}]
        options = {"max_tokens": max_tokens, "temperature": 0}
        async with ChatClient(target.base_url, api_key=target.api_key) as client:
            with PlainView() as view:
                incoming = PartialAnswer(num_nodes=target.num_nodes, max_tokens=max_tokens, view=view)
                answer = await stream_answer(client, target, messages, options, incoming)
        print_footer(answer)
        print(flush=True)

    async def _stay(self, node: StartedNode) -> None:
        from edgepipe.daemon.machine.http_keys import key_file, read_key

        self._say(f"\nready at http://127.0.0.1:{node.http_port}/v1 · model '{self._model}' · ^C stops it")
        if read_key(node.data_dir):
            self._say(f"      key     in {key_file(node.data_dir)}: other programs on this computer need it")
        self._say(f"      chat    edgepipe chat --data-dir {node.data_dir}")
        self._say(f"      look    edgepipe status --data-dir {node.data_dir}\n")
        await asyncio.Event().wait()

    def _say(self, text: str, *, style: str | None = None) -> None:
        self._console.print(text, style=style, soft_wrap=True)

    def _done(self, text: str) -> None:
        now = time.monotonic()
        self._console.print("  ✓ ", style="green", end="")
        self._console.print(f"{text}  ", end="", soft_wrap=True)
        self._console.print(f"{now - self._step_started:.1f} s", style="dim", soft_wrap=True)
        self._step_started = now
