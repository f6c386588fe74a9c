"""PURE: the life of each engine on this node. Events in, commands out.

::

    STARTING ──launched──> RUNNING ──its process ended──> PAUSED ──time, or a person──> STARTING
        │ first start failed   │                            │ too many crashes here
        ▼                      │ stop                       ▼
      FAILED                STOPPING ──stopped──> gone   HANDING_ON ──recorded──> gone (denied: PAUSED)

An engine that has served starts again after every crash; ``restarts`` says when. A model whose first start failed stays
listed until it is stopped or served again. An engine is killed and gone at once when another node has it, when the same
pipeline starts anew here, and when this node ends.

It uses no clock and no network: callers pass times as monotonic seconds. The shell is ``EngineHost``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from edgepipe.daemon.serving.engine_life_types import (
    Command,
    EngineStopped,
    Event,
    Forget,
    HandedOn,
    HandOn,
    Kill,
    Launch,
    Launched,
    LaunchFailed,
    LeaveWanted,
    NotHandedOn,
    PauseEnded,
    ProcessEnded,
    Serves,
    ShowFailure,
    ShowPause,
    StartNow,
    StartWanted,
    Stop,
    StopWanted,
    Superseded,
    Surroundings,
)
from edgepipe.daemon.serving.restarts import Restarts, next_host
from edgepipe.errors import EdgepipeError, StaleEpoch

_MOST_REMEMBERED = 64  # pipelines whose crashes are known: as many as models have records


class LifePhase(Enum):
    """Progress of an engine's life."""

    STARTING = auto()  # a process starts and gets its task
    RUNNING = auto()
    PAUSED = auto()  # the next start has a time
    HANDING_ON = auto()  # another node is being recorded for it
    STOPPING = auto()
    FAILED = auto()


@dataclass(slots=True, kw_only=True)
class _Life:
    """One engine, over all its processes."""

    run: int
    pipeline_id: str
    model: str
    replica: int
    ring: tuple[str, ...]
    restarts: Restarts
    resuming: bool  # the newest process continues another one's requests
    restartable: bool  # it has served, or continues another engine's requests
    phase: LifePhase = LifePhase.STARTING
    attempt: int = 0
    error: EdgepipeError | None = None  # error of the last crash


class EngineLives:
    """The engines of one node. Call ``handle`` with every event, in order."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}  # one per run
        self._restarts: dict[str, Restarts] = {}  # one per pipeline; an engine that comes back still counts its crashes
        self._attempts = 0

    @property
    def wake_at_s(self) -> float | None:
        """When ``PauseEnded`` is due."""
        paused = (life.restarts.next_start_s for life in self._lives.values() if life.phase is LifePhase.PAUSED)
        return min(paused, default=None)

    def phase(self, run: int) -> LifePhase | None:
        """Return an engine's phase; None once it is gone."""
        life = self._lives.get(run)
        return life.phase if life is not None else None

    def expects(self, run: int, attempt: int) -> bool:
        """Return whether this process is the engine's present one."""
        life = self._lives.get(run)
        return life is not None and life.attempt == attempt and life.phase in (LifePhase.STARTING, LifePhase.RUNNING)

    def handle(self, event: Event, around: Surroundings, now_s: float) -> list[Command]:
        """Handle an event at ``now_s`` (monotonic seconds). Return the commands to execute, in order."""
        match event:
            case StartWanted():
                return self._start(event, around, now_s)
            case Launched() | LaunchFailed() | Serves() | ProcessEnded():
                return self._went_on(event, around, now_s) if self.expects(event.run, event.attempt) else []
            case HandedOn() | NotHandedOn():
                return self._recorded(event, around, now_s)
            case StopWanted():
                return [command for life in self._of(event.pipeline_id) for command in self._stop(life)]
            case EngineStopped():
                return self._stopped(event.run)
            case Superseded():
                return [self._kill(life, now_s) for life in self._of(event.pipeline_id)]
            case LeaveWanted():
                return [self._kill(life, now_s) for life in list(self._lives.values())]
            case StartNow() | PauseEnded():
                due = self._due(event, now_s)
                return [command for life in due for command in self._launch(life, around, now_s)]

    def _of(self, pipeline_id: str) -> list[_Life]:
        return [life for life in self._lives.values() if life.pipeline_id == pipeline_id]

    def _due(self, event: StartNow | PauseEnded, now_s: float) -> list[_Life]:
        paused = [life for life in self._lives.values() if life.phase is LifePhase.PAUSED]
        if isinstance(event, StartNow):
            return [life for life in paused if life.pipeline_id == event.pipeline_id]
        return [life for life in paused if life.restarts.next_start_s <= now_s]

    # A start

    def _start(self, event: StartWanted, around: Surroundings, now_s: float) -> list[Command]:
        commands: list[Command] = []
        for life in list(self._lives.values()):
            if life.pipeline_id == event.pipeline_id:
                commands.append(self._kill(life, now_s))
            elif (life.model, life.replica) == (event.model, event.replica) and life.phase is LifePhase.FAILED:
                del self._lives[life.run]
                commands.append(Forget(run=life.run))
        life = _Life(
            run=event.run,
            pipeline_id=event.pipeline_id,
            model=event.model,
            replica=event.replica,
            ring=event.ring,
            restarts=self._restarts_of(event.pipeline_id),
            resuming=event.resuming,
            restartable=event.resuming,
        )
        self._lives[event.run] = life
        if event.resuming and life.restarts.left_s(now_s):
            crashed = EdgepipeError(f"the engine of '{event.model}' has crashed on this node before")
            return [*commands, *self._pause(life, crashed, around, now_s)]
        return [*commands, *self._launch(life, around, now_s, resuming=event.resuming)]

    def _restarts_of(self, pipeline_id: str) -> Restarts:
        known = self._restarts.pop(pipeline_id, None) or Restarts()
        while len(self._restarts) >= _MOST_REMEMBERED:
            del self._restarts[next(iter(self._restarts))]
        self._restarts[pipeline_id] = known
        return known

    def _launch(self, life: _Life, around: Surroundings, now_s: float, *, resuming: bool = True) -> list[Command]:
        if around.ends:
            return [self._kill(life, now_s)]
        self._attempts += 1
        life.phase, life.attempt, life.resuming = LifePhase.STARTING, self._attempts, resuming
        return [Launch(run=life.run, attempt=life.attempt, resuming=resuming)]

    # A process

    def _went_on(
        self, event: Launched | LaunchFailed | Serves | ProcessEnded, around: Surroundings, now_s: float
    ) -> list[Command]:
        life = self._lives[event.run]
        match event:
            case Launched():
                life.phase = LifePhase.RUNNING
                return []
            case Serves():
                life.restartable, life.ring = True, event.ring
                life.restarts.serves(now_s)
                return []
            case LaunchFailed() if life.resuming:
                return self._crashed(life, event.error, around, now_s)
            case LaunchFailed():
                return self._fail(life, event.error, release=False)
            case ProcessEnded():
                return self._ended(life, event, around, now_s)

    def _ended(self, life: _Life, event: ProcessEnded, around: Surroundings, now_s: float) -> list[Command]:
        stale = isinstance(event.error, StaleEpoch)
        if stale and life.pipeline_id not in around.owned:
            return [self._kill(life, now_s)]
        if around.ends and (life.restartable or not event.told):
            return [self._kill(life, now_s)]  # the signal that ended it also reached this node
        if life.restartable or stale:  # a stale engine's stages are free again
            return self._crashed(life, event.error, around, now_s)
        return self._fail(life, event.error, release=True)

    def _crashed(self, life: _Life, error: EdgepipeError, around: Surroundings, now_s: float) -> list[Command]:
        """Start the engine again after a pause, here or on another node of its ring."""
        life.restarts.ended(now_s)
        heir = next_host(around.own_id, life.ring, around.usable) if life.restarts.should_move else None
        if heir is None or life.pipeline_id not in around.owned:
            return self._pause(life, error, around, now_s)
        life.phase, life.error = LifePhase.HANDING_ON, error
        return [HandOn(run=life.run, heir=heir, error=error)]

    def _recorded(self, event: HandedOn | NotHandedOn, around: Surroundings, now_s: float) -> list[Command]:
        life = self._lives.get(event.run)
        if life is None or life.phase is not LifePhase.HANDING_ON:
            return []
        if isinstance(event, HandedOn):
            return [self._kill(life, now_s)]
        assert life.error is not None, "a crash led here"
        return self._pause(life, life.error, around, now_s)

    def _pause(self, life: _Life, error: EdgepipeError, around: Surroundings, now_s: float) -> list[Command]:
        """Wait until the engine's next start. Requests wait, too, if that is soon; else they end with the reason."""
        left_s = life.restarts.left_s(now_s)
        life.phase = LifePhase.PAUSED
        paused = ShowPause(run=life.run, error=error, left_s=left_s)
        return [paused, *([] if left_s else self._launch(life, around, now_s))]

    def _fail(self, life: _Life, error: EdgepipeError, *, release: bool) -> list[Command]:
        life.phase = LifePhase.FAILED
        return [ShowFailure(run=life.run, error=error, release=release)]

    # The end

    def _stop(self, life: _Life) -> list[Command]:
        self._restarts.pop(life.pipeline_id, None)
        if life.phase is LifePhase.STOPPING:
            return []
        life.phase = LifePhase.STOPPING
        return [Stop(run=life.run)]

    def _stopped(self, run: int) -> list[Command]:
        if self.phase(run) is not LifePhase.STOPPING:
            return []
        del self._lives[run]
        return [Forget(run=run)]

    def _kill(self, life: _Life, now_s: float) -> Command:
        del self._lives[life.run]
        life.restarts.stopped(now_s)
        return Kill(run=life.run)
