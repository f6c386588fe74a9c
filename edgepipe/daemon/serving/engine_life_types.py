"""Events and commands of the life of engines on a node."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.errors import EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What this node knows at the time of an event."""

    own_id: str
    usable: frozenset[str]  # reachable nodes that stay
    owned: frozenset[str]  # pipelines whose record names this node
    ends: bool  # this node is about to stop


# Events. ``run`` numbers the engines of this node; ``attempt`` is the number of the command that started the process.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWanted:
    """A pipeline gets its engine here."""

    run: int  # new
    pipeline_id: str
    model: str
    replica: int = 1  # the pipeline's number among the model's, from 1 on
    ring: tuple[str, ...]  # nodes of the stages
    resuming: bool  # another engine served the model before


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The process has its task."""

    run: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed:
    """The process did not start."""

    run: int
    attempt: int
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """The engine reports that it serves."""

    run: int
    attempt: int
    ring: tuple[str, ...]  # nodes of its present stages


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """A launched process ended unasked."""

    run: int
    attempt: int
    error: EdgepipeError
    told: bool  # the engine itself reported the error


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOn:
    """Another node is recorded for the engine."""

    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotHandedOn:
    """No other node may be recorded."""

    run: int


@dataclass(frozen=True, slots=True)
class StopWanted:
    """The model was stopped."""

    pipeline_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStopped:
    """The process and its stages have ended."""

    run: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another node has the pipeline's engine."""

    pipeline_id: str


@dataclass(frozen=True, slots=True)
class StartNow:
    """A person wants the pause to end."""

    pipeline_id: str


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """All engines go to other nodes."""


@dataclass(frozen=True, slots=True)
class PauseEnded:
    """``EngineLives.wake_at_s`` has passed."""


Event = (
    StartWanted
    | Launched
    | LaunchFailed
    | Serves
    | ProcessEnded
    | HandedOn
    | NotHandedOn
    | StopWanted
    | EngineStopped
    | Superseded
    | StartNow
    | LeaveWanted
    | PauseEnded
)


# Commands. ``Launch``, ``HandOn`` and ``Stop`` are each answered by one event.


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start a process and send it its task. Answer: Launched or LaunchFailed."""

    run: int
    attempt: int
    resuming: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowPause:
    """Show the error, and that the next start comes in ``left_s`` seconds."""

    run: int
    error: EdgepipeError
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowFailure:
    """Show that the first start failed. ``release``: end its stages, too."""

    run: int
    error: EdgepipeError
    release: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOn:
    """Record another node for the engine, which crashes here. Answer: HandedOn or NotHandedOn."""

    run: int
    heir: str
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Stop the process in order and end its stages. Answer: EngineStopped."""

    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End the process at once and forget the engine; its stages stay for the next one."""

    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Forget an engine without a process."""

    run: int


Command = Launch | ShowPause | ShowFailure | HandOn | Stop | Kill | Forget
