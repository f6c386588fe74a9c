"""What goes into the recovery core, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from edgepipe.engine.blame import Crash
from edgepipe.engine.placing import EpochPlacement, Reachable
from edgepipe.engine.quarantine import Missed, Way
from edgepipe.engine.sites import StageSite
from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, NodeId, RequestKey, SequenceId
from edgepipe.wire.engines import ServeSpec


class State(Enum):
    """What the pipeline is doing."""

    STARTING = auto()  # its first epoch is prepared; an error ends the engine
    SERVING = auto()
    PREPARING_BESIDE = auto()  # an epoch serves while the next one's stages load
    RECOVERING = auto()  # requests wait for the next epoch
    WAITING = auto()  # requests are refused until an epoch opens
    STOPPED = auto()


# Events. ``attempt`` is the number that the command had: what comes of an abandoned attempt is ignored.


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The daemon answered where stages go."""

    attempt: int
    plan: EpochPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningFailed:
    """The daemon knows no placement, or did not answer."""

    attempt: int
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All stages of the attempt are loaded."""

    attempt: int
    sites: tuple[StageSite, ...]
    crashes: tuple[Crash, ...] = ()  # of stages of the last epoch, whose processes ended by them


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationFailed:
    """A node refused, or was silent."""

    attempt: int
    error: EdgepipeError
    node_id: NodeId | None = None  # that failed, where it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Every stage of the attempt is ready for steps."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningFailed:
    """The attempt's stages could not be opened."""

    attempt: int
    error: EdgepipeError
    missed: Missed = field(default_factory=Missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """The epoch that served is over."""

    epoch: Epoch
    error: EdgepipeError
    crash: Crash | None = None
    missed: Missed = field(default_factory=Missed)
    sent: bool = False  # a step was sent to the stages
    retired: bool = False  # and one came back


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReleased:
    """Nodes that were to give back what they hold did not answer."""

    node_ids: frozenset[NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChanged:
    """Nodes, or what their devices can take, are others than before."""

    reachable: Reachable


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveProposed:
    """The daemon wants the stages elsewhere."""

    plan: EpochPlacement


@dataclass(frozen=True, slots=True)
class Stopped:
    """The model is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """``Recovery.wake_at_s`` has passed."""


Event = (
    Planned
    | PlanningFailed
    | Prepared
    | PreparationFailed
    | Opened
    | OpeningFailed
    | EpochEnded
    | NotReleased
    | ClusterChanged
    | MoveProposed
    | Stopped
    | Tick
)


# Commands.


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the stages of one epoch are."""

    epoch: Epoch
    spec: ServeSpec

    @property
    def node_ids(self) -> frozenset[NodeId]:
        """The nodes that hold its stages."""
        return frozenset(stage.node_id for stage in self.spec.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlan:
    """Ask the daemon where the stages of ``spec`` go now."""

    attempt: int
    spec: ServeSpec
    quarantined: Mapping[NodeId, float]  # see ``Planner.plan``
    quarantined_links: Mapping[Way, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Ask nodes for memory and loaded stages."""

    attempt: int
    placement: Placement
    fresh: frozenset[NodeId] = frozenset()  # nodes whose stage gets a new process


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open the pipeline over prepared stages."""

    attempt: int
    placement: Placement
    sites: tuple[StageSite, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give up what the attempt is doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Let requests go on in the epoch that has opened."""

    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpoch:
    """End the epoch that serves."""

    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give back what these nodes hold."""

    node_ids: frozenset[NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuse:
    """Count a broken step against its sequences."""

    sequences: tuple[SequenceId, ...]
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquit:
    """Count earlier broken steps against these requests no more."""

    requests: frozenset[RequestKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """End all requests with the error, and those that come until an epoch serves."""

    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The engine cannot go on."""

    error: EdgepipeError


Command = AskPlan | Prepare | Open | Abandon | Serve | EndEpoch | Release | Accuse | Acquit | Refuse | Fail
