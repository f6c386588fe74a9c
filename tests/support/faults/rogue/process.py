"""Starting the rogue beside real nodes, and watching what its attacks do to them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.faults.rogue.member import RogueSettings
from tests.support.processes.nodes import Node, children_of

ATTACK_S = 60.0  # a busy machine is slow; an attack takes some seconds
_LOOK_S = 0.05
_START_S = 5.0  # a process imports its modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the rogue says of an attack."""

    complaints: tuple[str, ...]  # what was let through
    prompts: int  # prompts that others sent it since it began
    took_s: float


@dataclass(slots=True, kw_only=True)
class RogueProcess:
    """The rogue, as a test holds it."""

    process: asyncio.subprocess.Process
    node_id: str

    async def attack(self, name: str) -> Outcome:
        """Carry out one attack; returns when it is over."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        answer = await _answer(self.process)
        return Outcome(complaints=tuple(answer["complaints"]), prompts=answer["prompts"], took_s=answer["took_s"])


@asynccontextmanager
async def start_rogue(
    data_dir: Path, honest: Sequence[Node], *, former_owner: Path, owner: Path
) -> AsyncGenerator[RogueProcess]:
    """A rogue with the identity in ``data_dir`` and the keys in the other two. It ends with the block."""
    settings = RogueSettings(
        data_dir=str(data_dir),
        former_owner=str(former_owner),
        owner=str(owner),
        honest={node.node_id: node.address for node in honest},
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tests.support.faults.rogue", json.dumps(asdict(settings))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        ready = await _answer(process)
        yield RogueProcess(process=process, node_id=ready["node_id"])
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(ATTACK_S):
        line = await process.stdout.readline()
    assert line, "the rogue ended; its standard error says why"
    return json.loads(line)


@dataclass(slots=True)
class Watch:
    """What honest nodes bear: the memory of every process, and how long a node's daemon takes to answer.

    A pause is the time from a cheap ``Admin.Status`` call on the node's Unix socket to its answer, asked again and
    again by this process: the daemon's event loop, and what the machine's other processes take of its processors, are
    both in it. So a pause means something beside one that was measured in the same way without an attack.
    """

    nodes: Sequence[Node]
    pauses_s: list[float] = field(default_factory=list[float])  # since ``begin``
    before: Mapping[int, int] = field(default_factory=dict[int, int])  # bytes, by process

    def remember(self) -> None:
        """Compare memory with what it is now, of all processes but those that are still starting."""
        started = time.time() - _START_S
        self.before = {}
        for pid, size in self.memory().items():
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).create_time() < started:
                    self.before[pid] = size

    def begin(self) -> None:
        """Measure pauses from now on."""
        self.pauses_s = []

    @property
    def longest_s(self) -> float:
        """The longest pause since ``begin``."""
        return max(self.pauses_s, default=0.0)

    def memory(self) -> dict[int, int]:
        """Bytes of every process of the nodes."""
        sizes: dict[int, int] = {}
        for node in self.nodes:
            for process in (psutil.Process(node.process.pid), *children_of(node.process.pid)):
                with suppress(psutil.NoSuchProcess):
                    sizes[process.pid] = process.memory_info().rss
        return sizes

    def growth_bytes(self) -> int:
        """Of the process that grew most, of those that were there at the beginning."""
        return max((size - self.before[pid] for pid, size in self.memory().items() if pid in self.before), default=0)

    async def run(self) -> None:
        """Ask each node in turn, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for node in self.nodes:
                tasks.create_task(self._ask(node), name=f"watch:{node.node_id}")

    async def _ask(self, node: Node) -> None:
        while True:
            began_s = time.monotonic()
            await node.status()
            self.pauses_s.append(time.monotonic() - began_s)
            await asyncio.sleep(_LOOK_S)
