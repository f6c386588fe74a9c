"""The nodes that a chaos run hurts: started, served on, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from edgepipe_emulated import emulated_model_config  # pyright: ignore[reportMissingTypeStubs] - typed, but no room
from edgepipe_emulated.faults import BROKEN, FULL  # pyright: ignore[reportMissingTypeStubs]

from edgepipe.cluster.absence import missed
from edgepipe.spec.facts import ModelConfig
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from tests.support.faults.chaos.sleepy_node import note_sleep
from tests.support.network.lan import LanLab
from tests.support.network.relay import relay
from tests.support.processes.nodes import Node, Nodes, children_of

MODEL = "tiny"
WHOLE_S = 60.0  # until a cluster is whole again, or a node is down
CONFIG = emulated_model_config(num_layers=6, context_length=4096)
SLEEPY = ("-m", "tests.support.faults.chaos.sleepy_node")


@dataclass(slots=True, kw_only=True)
class ChaosCluster:
    """Nodes with the model on every disk, and the ways to hurt them."""

    nodes: Nodes
    names: tuple[str, ...]
    flags: dict[str, Any]
    own_flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])  # keys are nodes
    model: str = MODEL
    config: ModelConfig = CONFIG
    http_port: int = 0  # where this process reaches the first node's gateway
    lab: LanLab | None = None
    running: dict[str, Node] = field(default_factory=dict[str, Node])

    @property
    def first(self) -> Node:
        """The node of the client."""
        return self.running[self.names[0]]

    async def start(self, *names: str) -> None:
        """Start these nodes, or all that do not run; a restarted one has its old identity, address and disk."""
        wanted = [name for name in (names or self.names) if name not in self.running]
        started = await asyncio.gather(*(self._start(name) for name in wanted))
        self.running.update(zip(wanted, started, strict=True))

    async def kill_node(self, name: str) -> None:
        """As a power cut: the daemon and all its children at once."""
        node = self.running.pop(name)
        family = children_of(node.process.pid)
        node.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await node.process.wait()

    def break_device(self, name: str, *, num_steps: int | None = None) -> None:
        """Let steps on the node's device fail: so many, or, if None is given, all until it is mended."""
        count = self._faults(name) / "count"
        count.write_text("" if num_steps is None else str(num_steps))
        count.rename(self._faults(name) / BROKEN)  # at once, as the device may look at any moment

    def fill_device(self, name: str) -> None:
        """Let another program take the node's device memory, so that nothing can be loaded, until it is mended."""
        (self._faults(name) / FULL).touch()

    def mend_device(self, name: str) -> None:
        """End what the node's device suffers from."""
        for fault in (BROKEN, FULL):
            (self._faults(name) / fault).unlink(missing_ok=True)

    def fall_asleep(self, name: str) -> None:
        """The machine sleeps: all that runs there stops."""
        self.signal_node(name, signal.SIGSTOP)

    def wake_up(self, name: str, *, slept_s: float) -> None:
        """The machine goes on where it stopped, and its clocks say how long it has slept."""
        note_sleep(self.nodes.folder / name, seconds=slept_s)
        self.signal_node(name, signal.SIGCONT)

    def signal_node(self, name: str, number: int) -> None:
        """To the daemon and all its children."""
        node = self.running[name]
        for process in (psutil.Process(node.process.pid), *children_of(node.process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    async def children(self, kind: str) -> list[tuple[str, int]]:
        """(node, pid) of every child of a kind that serves; spare stages are left out."""
        status = await self.first.status()
        serving = {int(stage.address.rpartition(":")[2]) for engine in status.engines for stage in engine.stages}
        found: list[tuple[str, int]] = []
        for name, node in self.running.items():
            pids = [child.pid for child in (await node.status()).children if child.kind == kind]
            found += [(name, pid) for pid in pids if kind != "stage" or serving & set(_listens_on(pid))]
        return sorted(found)

    async def stage_nodes(self) -> list[str]:
        """Names of the nodes with stages, in the order of a token's way."""
        status = await self.first.status()
        return [stage.node_name for engine in status.engines for stage in engine.stages]

    async def until_ready(self, *, num_nodes: int | None = None) -> ClusterStatus:
        """Everybody is there and the first node's gateway has an engine to ask."""
        wanted = num_nodes if num_nodes is not None else len(self.running)

        def ready(status: ClusterStatus) -> bool:
            alive = sum(member.state == "alive" for member in status.members)
            return (
                alive == wanted
                and not missed(status.absent)
                and [engine.state for engine in status.engines] == ["ready"]
            )

        return await self.first.until(ready, timeout_s=WHOLE_S)

    async def _start(self, name: str) -> Node:
        host = self.lab.host(name) if self.lab is not None else None
        flags = {**self.flags, **self.own_flags.get(name, {})}
        if flags.get("backend", "emulated") == "emulated":
            self._faults(name).mkdir(parents=True, exist_ok=True)
            flags["backend_options"] = f"{flags.get('backend_options', 'time_factor=0')},faults={self._faults(name)}"
        return await self.nodes.start(name, host=host, **flags)

    def _faults(self, name: str) -> Path:
        """Where an emulated device finds what it suffers from."""
        return self.nodes.folder / f"{name}-faults"


@asynccontextmanager
async def chaos_cluster(
    folder: Path,
    *,
    names: Sequence[str] = ("a", "b", "c"),
    plan: str = "b:0-2,c:3-5",
    lab: LanLab | None = None,
    model: str = MODEL,
    main: tuple[str, ...] = SLEEPY,
    config: ModelConfig = CONFIG,
    late: Sequence[str] = (),
    own_flags: Mapping[str, Mapping[str, Any]] | None = None,
    options: ServeSpec | None = None,
    **flags: Any,
) -> AsyncGenerator[ChaosCluster]:
    """Start nodes, serve a model over them by ``plan``; everything ends with the block.

    The emulated model is put on every disk; another ``model`` must be in the store that the flag ``models_dir`` names.

    config     shape of the emulated model
    late       names of nodes that are not started yet
    own_flags  of single nodes, by name, beside the ``flags`` of all
    options    how the model is served
    """
    nodes = Nodes(
        folder=folder, cluster=f"chaos-{folder.name[-40:]}-{random.randrange(10**6)}".replace("_", "-"), main=main
    )
    if model == MODEL:
        _put_on_every_disk(folder, names, config)
    if lab is None:
        flags.setdefault("link", "1gbit,2ms")  # tokens come at a pace at which a fault finds them under way
    cluster = ChaosCluster(
        nodes=nodes, names=tuple(names), flags=flags, own_flags=own_flags or {}, model=model, config=config, lab=lab
    )
    try:
        await cluster.start(*(name for name in names if name not in late))
        await _until_idle(cluster)
        await cluster.first.serve(model, plan=plan, options=options)
        async with _way_to_gateway(cluster) as cluster.http_port:
            yield cluster
    finally:
        for name in cluster.running:
            with contextlib.suppress(psutil.NoSuchProcess):
                cluster.signal_node(name, signal.SIGCONT)
        await nodes.end()


def _put_on_every_disk(folder: Path, names: Sequence[str], config: ModelConfig) -> None:
    source = folder / "source" / MODEL
    write_model_folder(source, config)
    for name in names:
        ModelStore(folder / name / "models").pull(str(source))


async def _until_idle(cluster: ChaosCluster) -> None:
    """Every node knows every node, and every device is ready to load."""

    def idle(status: ClusterStatus) -> bool:
        devices = [[device.state for device in member.node.devices] for member in status.members]
        return devices == [["idle"]] * len(cluster.running)

    for node in cluster.running.values():
        await node.until(idle)


@asynccontextmanager
async def _way_to_gateway(cluster: ChaosCluster) -> AsyncGenerator[int]:
    if cluster.lab is None:
        yield cluster.first.http_port
        return
    async with relay(cluster.lab.host(cluster.names[0]), cluster.first.http_port) as port:
        yield port


def _listens_on(pid: int) -> list[int]:
    """TCP ports; none of a process that is gone."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]
