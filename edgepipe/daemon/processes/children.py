"""Child processes: they read settings from standard input and attach over the Unix socket; the node ends them.

The nursery forks them, which saves their imports. Without a nursery, the system starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import replace

from edgepipe.clock import Clock
from edgepipe.config import Timeouts, child_environment
from edgepipe.daemon.processes.hang_watch import HangWatch
from edgepipe.daemon.processes.nursery import ForkedProcess, Nursery
from edgepipe.errors import EdgepipeError, PairingRejected, StageLost
from edgepipe.ids import StepId
from edgepipe.plain_words import plain
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.security.mutual_tls import Peer
from edgepipe.stage.step_mark import StepMark
from edgepipe.wire.children import (
    ChildCommand,
    ChildProgress,
    ChildReport,
    ChildStarted,
    Command,
    DeniedCall,
    Introduced,
    IntroducedPeer,
    IntroducedPeers,
    Report,
    StopChild,
)
from edgepipe.workers.nursery import ForkRequest
from edgepipe.workers.settings import ChildSettings

logger = logging.getLogger(__name__)

_MAIN = ("-m", "edgepipe.workers.main")
_LAST_LINES = 20  # lines of a child's output that are kept to explain its end
_MAX_LINE_BYTES = 1 << 16
_KNOWS_S = 1.0  # time that a child has to confirm its peers
_MAX_COMMANDS = 64  # a child takes commands at once; more waiting means that it hangs


class Child:
    """One running child process. Its reports arrive by ``on_report``; ``exited`` is set when the process is gone."""

    def __init__(
        self,
        settings: ChildSettings,
        process: asyncio.subprocess.Process | ForkedProcess,
        *,
        mark: StepMark | None = None,
        knows_s: float = _KNOWS_S,
    ) -> None:
        self._knows_s = knows_s
        self._mark = mark
        self.crashed_in: tuple[int, StepId] | None = None  # stages: the epoch's counter and the step of the crash
        self.settings = settings
        self.process = process
        self.started: asyncio.Future[ChildStarted] = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()
        self.stopping = False
        self.fault: EdgepipeError | None = None
        self.hang = ""  # the evidence that it hangs
        self.progress = ChildProgress()  # the newest
        self.on_progress: Callable[[ChildProgress], None] = lambda _progress: None
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.on_report: Callable[[Report], None] = lambda _report: None
        self.on_profiled: Callable[[LayerProfile], None] = lambda _profile: None
        self.engine: Peer | None = None  # stages: the engine that may send plans
        self.on_denied: Callable[[DeniedCall], None] = lambda _denied: None
        self._introduced: tuple[IntroducedPeer, ...] | None = None
        self._version = 0  # version of the introduced peers
        self._current = asyncio.Event()  # the child has confirmed the newest version
        self._commands: asyncio.Queue[ChildCommand | None] = asyncio.Queue(_MAX_COMMANDS)

    @property
    def kind(self) -> str:
        """stage | engine | gateway"""
        return self.settings.kind

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def port(self) -> int:
        """The port it listens on; 0 until reported."""
        well = self.started.done() and self.started.exception() is None
        return self.started.result().port if well else 0

    @property
    def certificate(self) -> bytes:
        """PEM, made by the process at its start; empty until reported."""
        well = self.started.done() and self.started.exception() is None
        return self.started.result().certificate if well else b""

    @property
    def state(self) -> str:
        """starting | running | stopping | exited"""
        if self.exited.is_set():
            return "exited"
        if self.stopping:
            return "stopping"
        return "running" if self.started.done() else "starting"

    @property
    def alive(self) -> bool:
        """Whether the process runs; exact also before its end was noticed here."""
        if self.exited.is_set() or self.stopping:
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    async def lives(self) -> bool:
        """Return whether the process answers. If it is silent for a second, return whether it still exists.

        A process that is being killed closes its connections some time before the system reports its end.
        """
        if self.alive and self._introduced is not None:
            self._tell_peers(self._introduced)
            await self.knows_peers()
        return self.alive

    def introduce(self, peers: tuple[IntroducedPeer, ...]) -> None:
        """Send the list of peers that the child may talk to, unless the child has that list."""
        if self._introduced is None or peers != self._introduced:
            self._tell_peers(peers)

    def _tell_peers(self, peers: tuple[IntroducedPeer, ...]) -> None:
        self._introduced = peers
        self._version += 1
        self._current.clear()
        self.send(IntroducedPeers(version=self._version, peers=peers))

    async def knows_peers(self) -> None:
        """Wait until the child confirms the introduced peers, it ends, or a second passes."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._current, self.exited)]
        try:
            await asyncio.wait(waiting, timeout=self._knows_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def send(self, command: Command) -> None:
        """Queue a command. A full queue means that the child hangs: kill it."""
        try:
            self._commands.put_nowait(ChildCommand(command=command))
        except asyncio.QueueFull:
            logger.error("child=%s pid=%d takes no commands: killed", self.kind, self.pid)
            self.kill()

    async def commands(self) -> AsyncIterator[ChildCommand]:
        """Yield the commands in order, until the child is gone."""
        while (command := await self._commands.get()) is not None:
            yield command

    def take_report(self, report: Report) -> None:
        """Handle one report of the child."""
        match report:
            case Introduced():
                if report.version == self._version:
                    self._current.set()
                return
            case DeniedCall():
                self.on_denied(report)
                return
            case ChildProgress():
                self.progress = report
                self.on_progress(report)
                return
            case ChildStarted() if not self.started.done():
                self.started.set_result(report)
            case EdgepipeError():
                self.fault = report
            case LayerProfile():
                self.on_profiled(report)
            case _:
                pass
        self.on_report(report)

    def kill(self) -> None:
        """End the whole process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self) -> None:
        """Note the end of the process and wake all waiters."""
        if self._mark is not None:
            self.crashed_in = self._mark.read() if self.hang or _crashed(self.process.returncode) else None
            self._mark.close()
            self._mark = None
        self.exited.set()
        with contextlib.suppress(asyncio.QueueFull):
            self._commands.put_nowait(None)
        if not self.started.done():
            self.started.set_exception(self.error())
            self.started.exception()  # marks the error as seen: no task may be waiting for it

    def error(self) -> EdgepipeError:
        """Return why the process ended, as far as is known."""
        if self.fault is not None:
            return self.fault
        if self.hang:
            return StageLost(f"the {self.kind} process hung and was ended", fact=self.hang, stage=self.kind)
        return StageLost(
            f"the {self.kind} process ended",
            fact=_how_it_ended(self.process.returncode, self.last_lines),
            next_step="see 'edgepipe logs'",
            stage=self.kind,
        )


class Children:
    """All child processes of a node."""

    def __init__(
        self,
        timeouts: Timeouts,
        clock: Clock,
        *,
        hang_check_s: float,
        nursery: Nursery | None = None,
        on_new: Callable[[Child], None] = lambda _child: None,
        on_denied: Callable[[DeniedCall], None] = lambda _denied: None,
    ) -> None:
        """``on_new``: a child was started and needs its list of peers. ``on_denied``: a child refused a call.

        ``hang_check_s``: the time between two checks for hanging children.
        """
        self._nursery = nursery
        self._hang_check_s = hang_check_s
        self._on_new = on_new
        self._on_denied = on_denied
        self._timeouts = timeouts
        self._clock = clock
        # Watch of each child by its id, from its first progress report on.
        self._hang_watches: dict[str, HangWatch] = {}
        self._children: dict[str, Child] = {}

    def running(self, kind: str = "") -> list[Child]:
        """Return the children whose process lives."""
        return [child for child in self._children.values() if not kind or child.kind == kind]

    async def start(self, settings: ChildSettings, tasks: asyncio.TaskGroup) -> Child:
        """Spawn the process and watch it from ``tasks``. Return before it has attached. Raises StageLost if the system
        starts no process."""
        with contextlib.ExitStack() as passed:
            mark, descriptor = _new_mark(passed) if settings.kind == "stage" else (None, -1)
            settings = replace(settings, mark=descriptor)
            process = await self._spawn(settings)
        child = Child(settings, process, mark=mark)
        self._children[settings.child_id] = child
        child.on_denied = self._on_denied
        self._on_new(child)
        logger.info("child started kind=%s pid=%d", child.kind, child.pid)
        tasks.create_task(self._watch(child), name=f"watch:{child.kind}:{child.pid}")
        assert process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it died already; the watcher reports that
            process.stdin.write(settings.to_line())
            await process.stdin.drain()
        return child

    async def _spawn(self, settings: ChildSettings) -> asyncio.subprocess.Process | ForkedProcess:
        try:
            return await self._fork(settings) or await self._exec(settings)
        except OSError as exc:  # no memory or no descriptors are left: that may pass
            raise StageLost(
                f"the {settings.kind} process cannot be started", fact=plain(exc), stage=settings.kind
            ) from exc

    async def _fork(self, settings: ChildSettings) -> ForkedProcess | None:
        if self._nursery is None:
            return None
        request = ForkRequest(kind=settings.kind, threads=settings.threads, mark=settings.mark)
        within_s = self._timeouts.child_start_s
        return await self._nursery.fork(request, mark=settings.mark, within_s=within_s, limit=_MAX_LINE_BYTES)

    async def _exec(self, settings: ChildSettings) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # import nothing from the current folder
            *_MAIN,
            settings.kind,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(threads=settings.threads),
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # only the daemon handles ^C of the terminal
            pass_fds=(settings.mark,) if settings.mark >= 0 else (),
        )

    async def wait_started(self, child: Child) -> ChildStarted:
        """Wait for the child's first report. Raises the reason of its end, or StageLost if it hangs or is too slow."""
        try:
            async with asyncio.timeout(self._timeouts.child_start_s):
                return await asyncio.shield(child.started)
        except TimeoutError as exc:
            child.kill()
            raise StageLost(
                f"the {child.kind} process did not start",
                fact=f"no report in {self._timeouts.child_start_s:.0f} s",
                stage=child.kind,
            ) from exc

    async def watch_hangs(self) -> None:
        """Kill children that hang, until cancelled. Their waiters see the end of the process."""
        while True:
            await asyncio.sleep(self._hang_check_s)
            now = self._clock.monotonic_s()
            for child_id, watch in list(self._hang_watches.items()):
                child = self._children.get(child_id)
                if child is None or child.exited.is_set():
                    del self._hang_watches[child_id]
                elif why := watch.why_hung(now=now, every_s=self._hang_check_s):
                    del self._hang_watches[child_id]
                    logger.error("child=%s pid=%d hangs and is killed: %s", child.kind, child.pid, why)
                    child.hang = why
                    child.kill()

    async def stop(self, child: Child) -> None:
        """Ask the child to stop, then kill it. Return when the process is gone."""
        child.stopping = True
        child.send(StopChild())
        if child.process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it has ended already
                child.process.stdin.write_eof()  # ends also a child that has not attached yet
        try:
            async with asyncio.timeout(self._timeouts.child_stop_s):
                await child.exited.wait()
        except TimeoutError:
            logger.warning("child=%s pid=%d did not stop: killed", child.kind, child.pid)
            child.kill()
            await child.exited.wait()

    async def stop_all(self, kind: str) -> None:
        """Stop all children of a kind at the same time."""
        await asyncio.gather(*(self.stop(child) for child in self.running(kind)))

    def kill_all(self) -> None:
        """End every child at once."""
        for child in list(self._children.values()):
            child.kill()

    async def attach(self, reports: AsyncIterator[ChildReport]) -> AsyncGenerator[ChildCommand]:
        """Serve ``Children.Attach``. Raises PairingRejected to a process that this node did not start."""
        first = await anext(aiter(reports), None)
        child = self._children.get(first.child_id) if first is not None else None
        if first is None or child is None:
            raise PairingRejected("this process is no child of the node", fact="its child id is unknown")
        self._take(child, first.report)
        reader = asyncio.create_task(self._read(child, reports), name=f"reports:{child.kind}:{child.pid}")
        try:
            async for command in child.commands():
                yield command
        finally:
            reader.cancel()

    async def _read(self, child: Child, reports: AsyncIterator[ChildReport]) -> None:
        async for report in reports:
            self._take(child, report.report)

    def _take(self, child: Child, report: Report) -> None:
        now = self._clock.monotonic_s()
        watch = self._hang_watches.get(child.settings.child_id)
        if isinstance(report, ChildProgress):
            if watch is None and not child.exited.is_set() and not child.hang:
                watch = HangWatch(hang_s=self._timeouts.hang_s, now=now)
                self._hang_watches[child.settings.child_id] = watch
            if watch is not None:
                watch.report(report, now=now)
        child.take_report(report)

    async def _watch(self, child: Child) -> None:
        assert child.process.stdout is not None
        try:
            while line := await _next_line(child.process.stdout):
                text = line.decode(errors="replace").rstrip()
                child.last_lines.append(text)
                logger.info("%s[%d] %s", child.kind, child.pid, text)
            await child.process.wait()
        finally:
            child.kill()  # the rest of its process group
            if child.process.returncode is None:
                await asyncio.shield(child.process.wait())
            self._children.pop(child.settings.child_id, None)
            child.ended()
            asked = ", as it was asked to" if child.stopping else ""
            logger.info(
                "child ended kind=%s pid=%d status=%s%s", child.kind, child.pid, child.process.returncode, asked
            )


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """Read the next line; replace a line that is too long."""
    try:
        return await stream.readline()
    except ValueError:
        return b"(a line too long to show)\n"


def _new_mark(passed: contextlib.ExitStack) -> tuple[StepMark | None, int]:
    """Make a mark for a new stage. Return it with the descriptor to pass on; ``passed`` closes the descriptor here.

    Return None and -1 if the disk takes no file: the node then cannot tell in which step a stage died.
    """
    try:
        file = passed.enter_context(tempfile.TemporaryFile())
        return StepMark(file.fileno()), file.fileno()
    except OSError as exc:
        logger.warning("the node cannot distinguish crashes inside steps from other crashes: %s", exc)
        return None, -1


def _crashed(status: int | None) -> bool:
    """Return whether a process crashed on its own: SIGKILL and SIGTERM come from people, or from lack of memory."""
    return status is not None and status != 0 and -status not in (signal.SIGKILL, signal.SIGTERM)


def _how_it_ended(status: int | None, last_lines: Iterable[str]) -> str:
    """Name the signal, else the exit status and the last line of output."""
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out"
    how = f"killed by {signal.Signals(-status).name}" if status is not None and status < 0 else f"exit status {status}"
    last = next((line for line in reversed(list(last_lines)) if line.strip()), "it wrote nothing")
    return f"{how}: {last}"
