"""The LAN lab: hosts with network stacks of their own on one machine, joined by a switch that can be made bad.

::

    async with LanLab(hosts=3) as lan:
        lan.shape(delay_s=0.002, bytes_per_s=125e6)            # all links, both ways
        node = await lan.host("a").spawn(["edgepipe", "node", "start"])
        lan.link("a", "b").change(loss=0.05)                   # one way
        lan.cut("c")                                           # c's cable is out
        lan.heal("c")

Addresses are 10.77.0.1, 10.77.0.2, ... and exist in the made namespaces only. A rate belongs to a directed pair of
hosts: two receivers of one sender do not share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import string
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from tests.support.network import lan_namespace
from tests.support.network.lan_switch import CableShape, DirectedLink, ShapeChanges, Switch

T = TypeVar("T")

_MAX_HOSTS = 26
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class LanAvailability:
    """Whether the LAN lab can run here; true or false by itself."""

    reason: str  # what is missing; empty if nothing is

    def __bool__(self) -> bool:
        return not self.reason


def lan_available() -> LanAvailability:
    """Try to make a namespace with a TAP in it. Takes about 50 ms."""
    return LanAvailability(lan_namespace.missing_parts() or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


class LanHost:
    """One machine of the lab: a network namespace and a folder of its own. Made by ``LanLab``."""

    def __init__(self, *, name: str, address: str, namespace: str, folder: Path) -> None:
        self.name = name
        self.address = address  # IPv4
        self.folder = folder  # empty at first, removed with the lab
        self.namespace = namespace
        self._popened: list[subprocess.Popen[Any]] = []
        self._spawned: list[asyncio.subprocess.Process] = []

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on this host."""
        return lan_namespace.command_in(self.namespace, list(command))

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host (``options`` as for ``subprocess.Popen``); killed when the lab ends."""
        process: subprocess.Popen[Any] = subprocess.Popen(self.command(command), **options)
        self._popened.append(process)
        return process

    async def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> asyncio.subprocess.Process:
        """Like ``popen`` for the running loop."""
        process = await asyncio.create_subprocess_exec(
            *self.command(command), stdin=asyncio.subprocess.DEVNULL, env=env, stdout=stdout, stderr=stderr
        )
        self._spawned.append(process)
        return process

    async def run(
        self, command: Sequence[str], *, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
    ) -> Finished:
        """Run a command to its end. Raises TimeoutError, with the process killed."""
        pipe = asyncio.subprocess.PIPE
        process = await self.spawn(command, env=env, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await process.communicate()
        except BaseException:
            if process.returncode is None:
                process.kill()
            await process.communicate()
            raise
        return Finished(exit_code=process.returncode or 0, stdout=stdout.decode(), stderr=stderr.decode())

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on a thread that is on this host. Sockets made there stay there, wherever they are used."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            outcome, failure = None, None
            try:
                lan_namespace.enter_namespace(self.namespace)
                outcome = function()
            except BaseException as exc:
                failure = exc
            loop.call_soon_threadsafe(_settle, done, outcome, failure)

        threading.Thread(target=work, name=f"lan-host-{self.name}", daemon=True).start()
        return await done

    async def end_processes(self) -> None:
        """Wait for what was started here (and was killed with the namespace)."""
        async with asyncio.timeout(_END_TIMEOUT_S):
            for process in self._spawned:
                await _read_rest(process)
                await process.wait()
        for process in self._popened:
            process.wait(timeout=_END_TIMEOUT_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class LanLab:
    """An async context manager around hosts and their switch. Raises RuntimeError where ``lan_available`` is false."""

    def __init__(
        self, hosts: int | Sequence[str] = 3, *, mtu: int = 1500, shape: CableShape | None = None, seed: int = 0
    ) -> None:
        """``hosts``: names, or how many (named a, b, c, ...); ``seed`` decides which frames a lossy link loses."""
        self._names = list(string.ascii_lowercase[:hosts] if isinstance(hosts, int) else hosts)
        if not 1 <= len(self._names) <= _MAX_HOSTS:
            raise ValueError(f"a lab has 1 to {_MAX_HOSTS} hosts")
        self._mtu = mtu
        pairs = [(source, target) for source in self._names for target in self._names if source != target]
        self._links = {pair: DirectedLink(shape or CableShape(), seed=seed + i) for i, pair in enumerate(pairs)}
        self._hosts: dict[str, LanHost] = {}
        self._descriptors: dict[str, int] = {}
        self._switch: Switch | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def hosts(self) -> list[LanHost]:
        """All hosts, in the order of their names' list."""
        return list(self._hosts.values())

    def host(self, name: str) -> LanHost:
        """One host."""
        return self._hosts[name]

    def link(self, source: str, target: str) -> DirectedLink:
        """The way from one host to another; ``change`` it at any time."""
        return self._links[source, target]

    def shape(self, **changes: Unpack[ShapeChanges]) -> None:
        """Change every link."""
        for link in self._links.values():
            link.change(**changes)

    async def cable(self, name: str, other: str, *, device: str, addresses: tuple[str, str]) -> None:
        """Join two hosts by a cable of their own, beside the switch: ``device`` at both ends, an address for each."""
        ends = list(zip((self._hosts[name], self._hosts[other]), addresses, strict=True))
        (first, _), (second, _) = ends
        commands = [(first, f"link add {device} type veth peer name {device} netns {second.namespace}")]
        for host, address in ends:
            commands += [(host, f"addr add {address} dev {device} nodad"), (host, f"link set {device} up")]
        for host, command in commands:
            done = await host.run(["ip", *command.split()])
            if done.exit_code != 0:
                raise RuntimeError(f"ip {command}: {done.stderr.strip()}")

    def cut(self, name: str, other: str | None = None) -> None:
        """Let nothing pass between two hosts, or between one and everybody."""
        self._set_cut(name, other, cut=True)

    def heal(self, name: str, other: str | None = None) -> None:
        """Undo ``cut``."""
        self._set_cut(name, other, cut=False)

    def _set_cut(self, name: str, other: str | None, *, cut: bool) -> None:
        wanted = {name} if other is None else {name, other}
        for pair, link in self._links.items():
            if wanted <= set(pair):
                link.change(cut=cut)

    async def __aenter__(self) -> Self:
        """Make everything; a few hundredths of a second per host, on the loop, so that cancellation cannot split it."""
        lan_namespace.remove_stale()
        try:
            self._build()
        except BaseException:
            await self._tear_down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tear_down()

    def _build(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="edgelan-")
        for index, name in enumerate(self._names):
            host = LanHost(
                name=name,
                address=f"10.77.0.{index + 1}",
                namespace=lan_namespace.namespace_name(f"{id(self):x}-{name}"),
                folder=Path(self._folder.name) / name,
            )
            host.folder.mkdir()
            self._hosts[name] = host
            self._descriptors[name] = lan_namespace.make_namespace(
                host.namespace, f"{host.address}/24", mtu=self._mtu, device=lan_namespace.device_name(index)
            )
        self._switch = Switch(self._descriptors, self._links)
        self._switch.start()

    async def _tear_down(self) -> None:
        """Processes first, then the network under them; goes on to the end whatever fails."""
        with contextlib.ExitStack() as last:
            if self._folder is not None:
                last.callback(self._folder.cleanup)
            for descriptor in self._descriptors.values():
                last.callback(os.close, descriptor)
            if self._switch is not None:
                last.callback(self._switch.stop)
            for host in self._hosts.values():
                last.callback(lan_namespace.remove_namespace, host.namespace)
            for host in self._hosts.values():
                lan_namespace.kill_processes(host.namespace)
            for host in self._hosts.values():
                await host.end_processes()


async def _read_rest(process: asyncio.subprocess.Process) -> None:
    """Empty the pipes, which else keep a process from counting as ended; not where the test itself still reads."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(RuntimeError):
                await stream.read()


def _settle(done: asyncio.Future[T], outcome: T | None, failure: BaseException | None) -> None:
    """Hand a thread's result to whoever still waits for it."""
    if done.done():
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(cast("T", outcome))
