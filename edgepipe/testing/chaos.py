"""Real nodes, streams of clients, and a seeded nemesis that strikes in mid-answer.

::

    async with chaos_cluster(folder, names=("a", "b", "c")) as cluster:
        run = ChaosRun(cluster, seed=7)
        await run.prepare()
        await run.trial("kill stage")            # asserts every rule of ``history``

The client's gateway is the first node's, which is never killed: who loses the machine that holds the client loses the
stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from edgepipe_emulated import emulated_model_config  # pyright: ignore[reportMissingTypeStubs] - typed, but no room

from edgepipe.daemon.system import SystemClock
from edgepipe.errors import EdgepipeError
from edgepipe.model.emulated_folder import write_model_folder
from edgepipe.model.store import ModelStore
from edgepipe.testing.chaos_client import RecordingClient
from edgepipe.testing.history import Answer, Ended, Given, History, Struck, assert_holds, check
from edgepipe.testing.lan import LanLab
from edgepipe.testing.nodes import HELLO, Node, Nodes, children_of
from edgepipe.testing.relay import relay
from edgepipe.wire.v1 import node_pb2 as pb

MODEL = "tiny"
_LAYERS = 6
_ANSWER_S = 90.0
_WHOLE_S = 60.0
_LOOK_S = 0.05


@dataclass(slots=True, kw_only=True)
class ChaosCluster:
    """Nodes with the model on every disk, and the ways to hurt them."""

    nodes: Nodes
    names: tuple[str, ...]
    flags: dict[str, Any]
    model: str = MODEL
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

    async def until_ready(self, *, num_nodes: int | None = None) -> pb.ClusterStatus:
        """Everybody is there and the first node's gateway has an engine to ask."""
        wanted = num_nodes if num_nodes is not None else len(self.running)

        def ready(status: pb.ClusterStatus) -> bool:
            alive = sum(member.state == "alive" for member in status.members)
            return alive == wanted and not status.absent and [engine.state for engine in status.engines] == ["ready"]

        return await self.first.until(ready, timeout_s=_WHOLE_S)

    async def _start(self, name: str) -> Node:
        host = self.lab.host(name) if self.lab is not None else None
        return await self.nodes.start(name, host=host, **self.flags)


@asynccontextmanager
async def chaos_cluster(
    folder: Path,
    *,
    names: Sequence[str] = ("a", "b", "c"),
    plan: str = "b:0-2,c:3-5",
    lab: LanLab | None = None,
    model: str = MODEL,
    main: tuple[str, ...] = ("-m", "edgepipe.daemon"),
    **flags: Any,
) -> AsyncGenerator[ChaosCluster]:
    """Start nodes, serve a model over them by ``plan``; everything ends with the block.

    The emulated model is put on every disk; another ``model`` must be in the store that the flag ``models_dir`` names.
    """
    nodes = Nodes(
        folder=folder, cluster=f"chaos-{folder.name[-40:]}-{random.randrange(10**6)}".replace("_", "-"), main=main
    )
    if model == MODEL:
        write_model_folder(folder / "source" / MODEL, emulated_model_config(num_layers=_LAYERS, context_length=4096))
        for name in names:
            ModelStore(folder / name / "models").pull(str(folder / "source" / MODEL))
    if lab is None:
        flags.setdefault("link", "1gbit,2ms")  # tokens come at a pace at which a fault finds them under way
    cluster = ChaosCluster(nodes=nodes, names=tuple(names), flags=flags, model=model, lab=lab)
    try:
        await cluster.start()
        idle = ["idle"]
        for node in cluster.running.values():
            await node.until(
                lambda status: (
                    len(status.members) == len(names)
                    and all([one.state for one in member.node.devices] == idle for member in status.members)
                )
            )
        await cluster.first.serve(model, plan=plan)
        async with _way_to_gateway(cluster) as cluster.http_port:
            yield cluster
    finally:
        for name in cluster.running:
            with contextlib.suppress(psutil.NoSuchProcess):
                cluster.signal_node(name, signal.SIGCONT)
        await nodes.end()


@asynccontextmanager
async def _way_to_gateway(cluster: ChaosCluster) -> AsyncGenerator[int]:
    if cluster.lab is None:
        yield cluster.first.http_port
        return
    async with relay(cluster.lab.host(cluster.names[0]), cluster.first.http_port) as port:
        yield port


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one fault did to the streams."""

    fault: str
    stalls_s: tuple[float, ...]  # per stream that it met under way: the longest time without a token

    @property
    def in_time(self) -> bool:
        """Whether it struck before the streams had ended."""
        return bool(self.stalls_s)


Fault = Callable[["ChaosRun"], Awaitable[None]]


class ChaosRun:
    """Trials against one cluster, all drawn from one seed."""

    def __init__(self, cluster: ChaosCluster, *, seed: int, max_tokens: int = 120, exact: bool = True) -> None:
        """``exact``: what is computed does not depend on what is computed beside it. Where it does, as on real models,
        only the number of tokens is known, and that nothing is sent twice."""
        self.cluster = cluster
        self.seed = seed
        self.random = random.Random(seed)
        self.history = History(seed=seed)
        self.trials: list[Trial] = []
        self._max_tokens = max_tokens
        self._exact = exact
        self._clock = SystemClock()
        self._expected: list[tuple[Mapping[str, Any], Answer]] = []
        self._number = 0
        self._moment: Callable[[], Awaitable[None]] = _now
        self._healing: list[Callable[[], Awaitable[None]]] = []

    async def prepare(self, *, num_requests: int = 5) -> None:
        """Draw requests and let each be answered without faults: that answer is the right one ever after."""
        await self.cluster.until_ready()
        for index in range(num_requests):
            body = self._draw_body(index)
            answer = await self._answer_of(body)
            if index % 3 == 2 and self._exact:
                body = {**body, "stop": [_stop_inside(answer.texts[0], self.random)]}
                answer = await self._answer_of(body)
            self._expected.append((body, answer))

    async def strike(self, what: str) -> None:
        """Wait for the moment, then write into the history what is done to the cluster now."""
        await self._moment()
        self.note(what)

    def note(self, what: str) -> None:
        """Write into the history what is done to the cluster."""
        self.history.add(Struck(at_s=self._clock.monotonic_s(), what=what))

    def heal_by(self, cure: Callable[[], Awaitable[None]]) -> None:
        """To be done when the streams of this trial have ended."""
        self._healing.append(cure)

    async def trial(
        self,
        fault: str,
        *,
        num_streams: int = 0,
        strike_at: float | None = None,
        one_leaves: bool = False,
        most_pause_s: float = 30.0,
        allowed_errors: Sequence[str] = (),
        whole_again: bool = True,
    ) -> Trial:
        """Start streams, strike when one of them is at a random token, wait for all to end, check all rules, heal.

        ``strike_at``: the share of the first stream's tokens at which to strike; None: drawn. ``one_leaves``: a client
        hangs up right after the fault. Raises AssertionError with seed and timeline.
        """
        self.history = History(seed=self.seed)
        client = RecordingClient(self.history, http_port=self.cluster.http_port, clock=self._clock)
        chosen = [self.random.choice(self._expected) for _ in range(num_streams or self.random.randint(1, 4))]
        names = [self._name() for _ in chosen]
        share = self.random.uniform(0.0, 0.7) if strike_at is None else strike_at
        moment = int(share * chosen[0][1].completion_tokens)
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(client.ask(name, body, answer_s=_ANSWER_S), name=name)
                for name, (body, _) in zip(names, chosen, strict=True)
            ]
            self._moment = partial(client.reached, names[0], moment)
            await FAULTS[fault](self)
            if one_leaves and asking[-1].cancel():
                client.left(names[-1])
        ended_at_s = self._clock.monotonic_s()
        answers = {name: answer for name, (_, answer) in zip(names, chosen, strict=True)}
        for name, answer in answers.items() if not self._exact else ():
            counts = [list(map(len, one.ids)) for one in (self.history.answer(name), answer)]
            assert counts[0] == counts[1], f"seed {self.seed}: {name} has {counts[0]} tokens, not {counts[1]}"
        found = check(
            self.history,
            expected=answers if self._exact else {},
            most_pause_s=most_pause_s,
            allowed_errors=allowed_errors,
            ended_at_s=ended_at_s,
        )
        assert_holds(self.history, found)
        await self.heal()
        if whole_again:
            await self.cluster.until_ready()
            await self.cluster.first.until(kv_is_free)
        struck_at_s = next(event.at_s for event in self.history.events if isinstance(event, Struck))
        stalls = (self.history.stall_s(name, since_s=struck_at_s) for name in names)
        trial = Trial(fault=fault, stalls_s=tuple(stall for stall in stalls if stall is not None))
        self.trials.append(trial)
        return trial

    async def heal(self) -> None:
        """Undo what the last fault left."""
        for cure in self._healing:
            await cure()
        self._healing.clear()

    async def victim(self, kind: str, *, spare_first: bool = True) -> tuple[str, int]:
        """A random serving child of a kind, not on the client's node where others have one."""
        found: list[tuple[str, int]] = []
        async with asyncio.timeout(_WHOLE_S):
            while not found:
                with contextlib.suppress(EdgepipeError):
                    found = await self.cluster.children(kind)
                if not found:
                    await asyncio.sleep(_LOOK_S)
        elsewhere = [one for one in found if one[0] != self.cluster.names[0]]
        return self.random.choice(elsewhere if elsewhere and spare_first else found)

    async def victim_node(self, kind: str) -> str:
        """A node with a serving child of a kind, never the client's: any other where only that has one."""
        name, _ = await self.victim(kind)
        return name if name != self.cluster.names[0] else self.other_node()

    def other_node(self) -> str:
        """A random node that is not the client's."""
        return self.random.choice([name for name in self.cluster.running if name != self.cluster.names[0]])

    async def _answer_of(self, body: Mapping[str, Any]) -> Answer:
        history = History(seed=self.seed)
        client = RecordingClient(history, http_port=self.cluster.http_port, clock=self._clock)
        async with asyncio.timeout(_WHOLE_S):
            while True:
                name = self._name()
                await client.ask(name, body, answer_s=_ANSWER_S)
                last = history.of(name)[-1]
                if isinstance(last, Ended) and last.how == "done":
                    return history.answer(name)
                if any(isinstance(event, Given) for event in history.of(name)):
                    raise AssertionError(f"seed {self.seed}: no answer without faults: {last}")
                await asyncio.sleep(_LOOK_S)  # the gateway has not heard of the model yet

    def _draw_body(self, index: int) -> dict[str, Any]:
        draw = self.random
        prefix = [ord(char) for char in "what every prompt begins with, over two blocks"] if index % 2 else []
        prompt = [*prefix, *(draw.randrange(256) for _ in range(draw.randint(3, 60)))]
        drawn = index % 3 == 1
        if index % 6 == 3:
            return self._structured_body()
        return {
            "model": self.cluster.model,
            "prompt": prompt,
            "max_tokens": draw.randint(self._max_tokens // 2, self._max_tokens),
            "n": draw.choice((1, 1, 2, 3)),
            "temperature": 0.8 if drawn else 0.0,
            "seed": draw.randrange(1 << 32),
            "ignore_eos": True,
        }

    def _structured_body(self) -> dict[str, Any]:
        """An answer that must obey a grammar, whose state is a function of the tokens before."""
        digits = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 60}
        schema = {"name": "numbers", "schema": digits, "strict": True}
        return {
            "model": self.cluster.model,
            "messages": [{"role": "user", "content": f"numbers {self.random.randrange(1000)}"}],
            "max_tokens": self._max_tokens,
            "temperature": 0.8,
            "seed": self.random.randrange(1 << 32),
            "response_format": {"type": "json_schema", "json_schema": schema},
        }

    def _name(self) -> str:
        self._number += 1
        return f"stream-{self._number}"


def _listens_on(pid: int) -> list[int]:
    """TCP ports; none of a process that is gone."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]


def kv_is_free(status: pb.ClusterStatus) -> bool:
    """Nothing runs, nothing waits, and no KV block is held: who left or was recovered has given all back."""
    return all(
        engine.free_blocks == engine.num_blocks and not engine.running and not engine.waiting
        for engine in status.engines
    )


async def _now() -> None:
    """The moment is always."""


def _stop_inside(text: str, draw: random.Random) -> str:
    """Two to four characters from the second half of a text: they will be cut by tokens, and perhaps by the fault."""
    start = draw.randrange(len(text) // 2, max(len(text) // 2 + 1, len(text) - 6))
    return text[start : start + draw.randint(2, 4)] or "never"


async def _kill_stage(run: ChaosRun) -> None:
    name, pid = await run.victim("stage")
    await run.strike(f"SIGKILL stage {pid} on {name}")
    psutil.Process(pid).kill()


async def _crash_stage(run: ChaosRun) -> None:
    name, pid = await run.victim("stage")
    await run.strike(f"SIGSEGV stage {pid} on {name}")
    psutil.Process(pid).send_signal(signal.SIGSEGV)


async def _term_stage(run: ChaosRun) -> None:
    """As an upgrade would: it ends in order, and is lost all the same."""
    name, pid = await run.victim("stage")
    await run.strike(f"SIGTERM stage {pid} on {name}")
    psutil.Process(pid).terminate()


async def _kill_stages_again_and_again(run: ChaosRun) -> None:
    """A storm: five kills, each as soon as something serves again, or sooner."""
    for turn in range(5):
        name, pid = await run.victim("stage")
        if turn == 0:
            await run.strike(f"SIGKILL stage {pid} on {name}")
        else:
            run.note(f"SIGKILL stage {pid} on {name}")
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
        await asyncio.sleep(run.random.uniform(0.1, 1.0))


async def _kill_two_stages(run: ChaosRun) -> None:
    victims = (await run.cluster.children("stage"))[-2:]
    for name, pid in victims:
        await run.strike(f"SIGKILL stage {pid} on {name}")
        psutil.Process(pid).kill()


async def _kill_stage_twice(run: ChaosRun) -> None:
    """The second fault meets the recovery from the first."""
    await _kill_stage(run)
    await asyncio.sleep(run.random.uniform(0.0, 0.6))
    name, pid = await run.victim("stage")
    run.note(f"SIGKILL stage {pid} on {name}, in the recovery")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()


async def _kill_engine(run: ChaosRun) -> None:
    name, pid = await run.victim("engine")
    await run.strike(f"SIGKILL engine {pid} on {name}")
    psutil.Process(pid).kill()


async def _stop_stage(run: ChaosRun) -> None:
    """It hangs; thawed, if it was not ended, it must be harmless."""
    name, pid = await run.victim("stage")
    await _freeze(run, f"stage {pid} on {name}", [psutil.Process(pid)], thaw_s=8.0)


async def _stop_engine(run: ChaosRun) -> None:
    name, pid = await run.victim("engine")
    await _freeze(run, f"engine {pid} on {name}", [psutil.Process(pid)], thaw_s=8.0)


async def _stop_node(run: ChaosRun) -> None:
    """A machine that freezes as a whole and thaws: its late frames must be dropped."""
    name = run.other_node()
    process = psutil.Process(run.cluster.running[name].process.pid)
    await _freeze(run, f"all of {name}", [process, *children_of(process.pid)], thaw_s=6.0)


async def _blink_node(run: ChaosRun) -> None:
    """Frozen shorter than anybody would call dead."""
    name = run.other_node()
    process = psutil.Process(run.cluster.running[name].process.pid)
    await _freeze(run, f"all of {name} for 1 s", [process, *children_of(process.pid)], thaw_s=1.0)


async def _kill_node(run: ChaosRun) -> None:
    name = run.other_node()
    await run.strike(f"power cut at {name}")
    await run.cluster.kill_node(name)

    async def cure() -> None:
        await run.cluster.start(name)

    run.heal_by(cure)


async def _kill_daemon(run: ChaosRun) -> None:
    """The daemon alone: its children must not live on without it."""
    name = run.other_node()
    node = run.cluster.running.pop(name)
    family = children_of(node.process.pid)
    await run.strike(f"SIGKILL daemon of {name} alone")
    node.kill()
    await node.process.wait()

    async def cure() -> None:
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10.0)
        assert not alive, f"children outlived their daemon: {alive}"
        await run.cluster.start(name)

    run.heal_by(cure)


async def _drain_stages_node(run: ChaosRun) -> None:
    """A machine is to be switched off: its stages are prepared elsewhere first."""
    name, _ = await run.victim("stage")
    await run.strike(f"{name} is drained")
    await _drain(run, name)


async def _drain_engines_node(run: ChaosRun) -> None:
    """As before, and the engine is there, too."""
    name, _ = await run.victim("engine", spare_first=False)
    await run.strike(f"{name} is drained, with the engine")
    await _drain(run, name)


async def _kill_stage_in_drain(run: ChaosRun) -> None:
    """A stage dies while stages move: the old epoch or the new one goes on, never both."""
    name, _ = await run.victim("stage")
    pids = [pid for _, pid in await run.cluster.children("stage")]
    await run.strike(f"{name} is drained")
    draining = asyncio.ensure_future(_drain(run, name))
    await asyncio.sleep(run.random.uniform(0.0, 0.5))
    pid = run.random.choice(pids)
    run.note(f"SIGKILL stage {pid} meanwhile")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()
    await draining


async def _drain(run: ChaosRun, name: str) -> None:
    """Returns when nothing runs there any more; it takes work again when the trial is over."""
    node = run.cluster.running[name]

    async def cure() -> None:
        run.note(f"{name} takes work again")
        async with node.admin() as admin:
            async for _ in admin.Drain(pb.DrainRequest(hello=HELLO, undo=True), timeout=5):
                pass

    run.heal_by(cure)
    async with node.admin() as admin:
        async for _ in admin.Drain(pb.DrainRequest(hello=HELLO), timeout=_WHOLE_S):
            pass
    run.note(f"nothing runs on {name}")


async def _term_engines_node(run: ChaosRun) -> None:
    """The engine's machine is shut down in order."""
    name = await run.victim_node("engine")
    node = run.cluster.running.pop(name)
    await run.strike(f"SIGTERM {name}")
    node.process.terminate()

    async def cure() -> None:
        async with asyncio.timeout(_WHOLE_S):
            await node.process.wait()
        await run.cluster.start(name)

    run.heal_by(cure)


async def _announce_sleep(run: ChaosRun) -> None:
    """The system tells that the machine is about to sleep; it then sleeps without another word."""
    name = await run.victim_node("stage")
    node = run.cluster.running[name]
    await run.strike(f"{name} is about to sleep")
    node.process.send_signal(signal.SIGUSR1)
    asleep = await run.cluster.first.until(
        lambda status: any(one.state == "asleep" for one in status.absent), timeout_s=15.0
    )
    run.note(f"asleep: {[one.name for one in asleep.absent]}")
    await run.cluster.kill_node(name)

    async def cure() -> None:
        await run.cluster.start(name)

    run.heal_by(cure)


async def _kill_gateway(run: ChaosRun) -> None:
    """Another node's: it has no client here."""
    name = run.other_node()
    own = await run.cluster.running[name].status()
    for child in own.children:
        if child.kind == "gateway":
            await run.strike(f"SIGKILL gateway {child.pid} of {name}")
            psutil.Process(child.pid).kill()


async def _cut_node(run: ChaosRun) -> None:
    """A cable is pulled, and put back when the streams have ended."""
    lab = run.cluster.lab
    assert lab is not None, "cuts need the LAN lab"
    name = run.other_node()
    await run.strike(f"cable of {name} out")
    lab.cut(name)

    async def cure() -> None:
        run.note(f"cable of {name} in")
        lab.heal(name)

    run.heal_by(cure)


async def _cut_one_way(run: ChaosRun) -> None:
    """Nothing that one node says arrives; it hears all."""
    lab = run.cluster.lab
    assert lab is not None, "cuts need the LAN lab"
    name = run.other_node()
    await run.strike(f"{name} is not heard any more")
    others = [other for other in run.cluster.names if other != name]
    for other in others:
        lab.link(name, other).change(cut=True)

    async def cure() -> None:
        for other in others:
            lab.link(name, other).change(cut=False)

    run.heal_by(cure)


async def _cut_pair(run: ChaosRun) -> None:
    """Two nodes that are not the client's lose each other; both reach the client's."""
    lab = run.cluster.lab
    assert lab is not None, "cuts need the LAN lab"
    one, other = run.random.sample(run.cluster.names[1:], 2)
    await run.strike(f"{one} and {other} do not reach each other")
    lab.cut(one, other)

    async def cure() -> None:
        lab.heal(one, other)

    run.heal_by(cure)


async def _flap_node(run: ChaosRun) -> None:
    """A cable with a loose contact: a second on, a second off."""
    lab = run.cluster.lab
    assert lab is not None, "cuts need the LAN lab"
    name = run.other_node()
    await run.strike(f"cable of {name} loose")
    for _ in range(4):
        lab.cut(name)
        await asyncio.sleep(1.0)
        lab.heal(name)
        await asyncio.sleep(1.0)
    run.note(f"cable of {name} in")


async def _change_address(run: ChaosRun) -> None:
    """From one network to another that has the same machines: the old address is gone, and so is every connection."""
    lab = run.cluster.lab
    assert lab is not None, "other addresses need the LAN lab"
    name = run.other_node()
    host = lab.host(name)
    address = f"10.77.{run.random.randint(1, 250)}.{run.random.randint(1, 250)}/16"
    await run.strike(f"{name} gets the address {address}")
    for command in ("addr flush dev lan0", f"addr add {address} dev lan0", "route add default dev lan0"):
        done = await host.run(["ip", *command.split()])
        assert done.exit_code == 0, done.stderr


async def _blink_links(run: ChaosRun) -> None:
    """Every link silent for half a second."""
    lab = run.cluster.lab
    assert lab is not None, "cuts need the LAN lab"
    await run.strike("all cables out for 0.5 s")
    lab.shape(cut=True)
    await asyncio.sleep(0.5)
    lab.shape(cut=False)


async def _lossy_links(run: ChaosRun) -> None:
    """Five in a hundred frames vanish until the streams have ended."""
    lab = run.cluster.lab
    assert lab is not None, "losses need the LAN lab"
    await run.strike("5 % loss everywhere")
    lab.shape(loss=0.05)

    async def cure() -> None:
        lab.shape(loss=0.0)

    run.heal_by(cure)


async def _slow_links(run: ChaosRun) -> None:
    """50 ms more each way and 8 Mbit/s until the streams have ended."""
    lab = run.cluster.lab
    assert lab is not None, "slow links need the LAN lab"
    await run.strike("50 ms and 8 Mbit/s everywhere")
    lab.shape(delay_s=0.05, bytes_per_s=1e6)

    async def cure() -> None:
        lab.shape(delay_s=0.0005, bytes_per_s=125e6)

    run.heal_by(cure)


async def _freeze(run: ChaosRun, what: str, processes: Sequence[psutil.Process], *, thaw_s: float) -> None:
    await run.strike(f"SIGSTOP {what}")
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    until_s = time.monotonic() + thaw_s

    async def cure() -> None:
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        run.note(f"SIGCONT {what}")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    if thaw_s < 2.0:
        await cure()
    else:
        run.heal_by(cure)


FAULTS: dict[str, Fault] = {
    "kill stage": _kill_stage,
    "crash stage": _crash_stage,
    "term stage": _term_stage,
    "kill two stages": _kill_two_stages,
    "stage storm": _kill_stages_again_and_again,
    "kill stage twice": _kill_stage_twice,
    "kill engine": _kill_engine,
    "stop stage": _stop_stage,
    "stop engine": _stop_engine,
    "stop node": _stop_node,
    "blink node": _blink_node,
    "kill node": _kill_node,
    "kill daemon": _kill_daemon,
    "kill gateway": _kill_gateway,
    "drain node": _drain_stages_node,
    "drain engine": _drain_engines_node,
    "kill stage in drain": _kill_stage_in_drain,
    "term node": _term_engines_node,
    "announce sleep": _announce_sleep,
    "cut node": _cut_node,
    "cut one way": _cut_one_way,
    "cut pair": _cut_pair,
    "flap node": _flap_node,
    "change address": _change_address,
    "blink links": _blink_links,
    "lossy links": _lossy_links,
    "slow links": _slow_links,
}
