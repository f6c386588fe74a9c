"""Events and commands of the recovery core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from edgepipe.engine.blame import Crash
from edgepipe.engine.placing import EpochPlacement, ReachableNodes
from edgepipe.engine.progress import EpochProgress
from edgepipe.engine.quarantine import Missed, Way
from edgepipe.engine.sites import StageSite
from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, NodeId, RequestKey, SequenceId
from edgepipe.wire.engines import ServeSpec


class State(Enum):
    """State of the pipeline."""

    STARTING = auto()  # the first epoch is being prepared; an error ends the engine
    SERVING = auto()
    PREPARING_BESIDE = auto()  # an epoch serves while the next one's stages load
    RECOVERING = auto()  # requests wait for the next epoch
    WAITING = auto()  # requests are refused until an epoch opens
    STOPPED = auto()


# Events. ``attempt`` is the command's number; events of an abandoned attempt are ignored.


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The daemon returned a placement."""

    attempt: int
    plan: EpochPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningFailed:
    """The daemon found no placement, or did not answer."""

    attempt: int
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesLoaded:
    """All stages of the attempt are loaded."""

    attempt: int
    sites: tuple[StageSite, ...]
    crashes: tuple[Crash, ...] = ()  # steps of the last epoch that ended stage processes


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationFailed:
    """A node refused, or did not answer."""

    attempt: int
    error: EdgepipeError
    node_id: NodeId | None = None  # the failed node, where known


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
    """The serving epoch ended."""

    epoch: Epoch
    error: EdgepipeError
    crash: Crash | None = None
    node_id: NodeId | None = None  # the node whose stage ended it, where known
    missed: Missed = field(default_factory=Missed)
    progress: EpochProgress = field(default_factory=EpochProgress)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReleased:
    """Nodes did not answer a release."""

    node_ids: frozenset[NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChanged:
    """Reachable nodes or their free memory changed."""

    reachable: ReachableNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveProposed:
    """The daemon proposes another placement."""

    plan: EpochPlacement


@dataclass(frozen=True, slots=True)
class Stopped:
    """The model was stopped."""


@dataclass(frozen=True, slots=True)
class Tick:
    """``Recovery.wake_at_s`` has passed."""


Event = (
    Planned
    | PlanningFailed
    | StagesLoaded
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
    """Placement of one epoch's stages."""

    epoch: Epoch
    spec: ServeSpec

    @property
    def node_ids(self) -> frozenset[NodeId]:
        """Nodes of the stages."""
        return frozenset(stage.node_id for stage in self.spec.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlacement:
    """Ask the daemon for a placement of ``spec``."""

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
    """Cancel the attempt's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Resume requests in the epoch that has opened."""

    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpoch:
    """End the serving epoch."""

    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Release the stages and memory of these nodes."""

    node_ids: frozenset[NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuse:
    """Count a crashed step against its sequences."""

    sequences: tuple[SequenceId, ...]
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquit:
    """Forget earlier crashed steps of these requests."""

    requests: frozenset[RequestKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Try these requests one by one in the next epochs; no other request is suspected."""

    requests: frozenset[RequestKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseOne:
    """End this request with the error."""

    request: RequestKey
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """End all requests with the error, and refuse new ones until an epoch serves."""

    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """End the engine with an error."""

    error: EdgepipeError


Command = (
    AskPlacement
    | Prepare
    | Open
    | Abandon
    | Serve
    | EndEpoch
    | Release
    | Accuse
    | Acquit
    | Suspect
    | RefuseOne
    | Refuse
    | Fail
)
