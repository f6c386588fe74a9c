"""What every fault needs: whom to strike, when, where to write it down, and how it is undone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil

from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError
from tests.support.faults.chaos.cluster import WHOLE_S, ChaosCluster
from tests.support.faults.history import History, Struck
from tests.support.network.lan import LanLab

LOOK_S = 0.05
_SHORT_S = 2.0  # frozen for less: thawed within the fault, not after the trial


class Nemesis:
    """Strikes one cluster, trial after trial; draws its victims from ``random``."""

    def __init__(self, cluster: ChaosCluster, *, random: random.Random, clock: Clock) -> None:
        self.cluster = cluster
        self.random = random
        self._clock = clock
        self._history = History(seed=0)
        self._moment: Callable[[], Awaitable[None]] | None = None
        self._healing: list[Callable[[], Awaitable[None]]] = []

    @property
    def lab(self) -> LanLab:
        """Where cables can be pulled. Raises AssertionError on loopback."""
        assert self.cluster.lab is not None, "faults of links need the LAN lab"
        return self.cluster.lab

    def begin(self, history: History, *, moment: Callable[[], Awaitable[None]]) -> None:
        """A trial begins: ``moment`` returns when it is time to strike, ``history`` is where it is written down."""
        self._history, self._moment = history, moment

    async def strike(self, what: str) -> None:
        """Wait for the moment, then write into the history what is done to the cluster now."""
        if self._moment is not None:
            await self._moment()
        self.note(what)

    def note(self, what: str) -> None:
        """Write into the history what is done to the cluster."""
        self._history.add(Struck(at_s=self._clock.monotonic_s(), what=what))

    def heal_by(self, cure: Callable[[], Awaitable[None]]) -> None:
        """To be done when the streams of this trial have ended."""
        self._healing.append(cure)

    async def heal(self) -> None:
        """Undo what the last fault left."""
        for cure in self._healing:
            await cure()
        self._healing.clear()

    async def victims(self, kind: str) -> list[tuple[str, int]]:
        """All serving children of a kind, (node, pid); waits for one where there is none now."""
        found: list[tuple[str, int]] = []
        async with asyncio.timeout(WHOLE_S):
            while not found:
                with contextlib.suppress(EdgepipeError):
                    found = await self.cluster.children(kind)
                if not found:
                    await asyncio.sleep(LOOK_S)
        return found

    async def victim(self, kind: str, *, spare_first: bool = True) -> tuple[str, int]:
        """A random serving child of a kind, (node, pid), not on the client's node where others have one."""
        found = await self.victims(kind)
        elsewhere = [process for process in found if process[0] != self.cluster.names[0]]
        return self.random.choice(elsewhere if elsewhere and spare_first else found)

    async def victim_node(self, kind: str) -> str:
        """A node with a serving child of a kind, never the client's: any other where only that has one."""
        name, _ = await self.victim(kind)
        return name if name != self.cluster.names[0] else self.other_node()

    def other_node(self) -> str:
        """A random node that is not the client's."""
        return self.random.choice([name for name in self.cluster.running if name != self.cluster.names[0]])

    async def freeze(self, what: str, processes: Sequence[psutil.Process], *, thaw_s: float) -> None:
        """Strike by stopping processes for so long; a long stop goes on beside the streams."""
        await self.strike(f"SIGSTOP {what}")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        until_s = time.monotonic() + thaw_s

        async def thaw() -> None:
            await asyncio.sleep(max(0.0, until_s - time.monotonic()))
            self.note(f"SIGCONT {what}")
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

        if thaw_s < _SHORT_S:
            await thaw()
        else:
            self.heal_by(thaw)


Fault = Callable[[Nemesis], Awaitable[None]]
