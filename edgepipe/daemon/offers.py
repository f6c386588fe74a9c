"""What the parts of a node offer each other, where a part should not know the other's whole class."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Protocol

from edgepipe.wire.batches import BatchReport
from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import ClusterStatus, ClusterView
from edgepipe.wire.serving import ServeEvent
from edgepipe.workers.settings import ChildSettings


class PublishedState(Protocol):
    """The state that this node shows the others; ``LocalNode``."""

    def refresh(self, *, urgent: bool = True) -> None:
        """Build the state again. Other nodes get a changed state at once when ``urgent``, else with the next beat."""
        ...

    def watch(self) -> AsyncIterator[None]:
        """Yield at once, and after every change of this node or of the cluster as this node sees it."""
        ...


class ChildSetup(Protocol):
    """Settings of new child processes; ``NodeBasis``."""

    def child_settings(self, kind: str, *, http_port: int = 0) -> ChildSettings:
        """Make the settings of a new child: stage | engine | gateway."""
        ...


class NodeLife(Protocol):
    """The node as a whole; ``NodeDaemon``."""

    def ends(self) -> bool:
        """Return whether the node was asked to stop; it may still be handing work over."""
        ...

    def lost(self, node_id: str) -> None:
        """Note that a member is dead or has left."""
        ...

    def yield_identity(self, address: str) -> None:
        """Stop this node: another node has its id."""
        ...

    async def shut_down(self) -> str:
        """Begin to stop the node. Return what becomes of its work."""
        ...

    def begin_anew(self) -> None:
        """End this node so that it starts again: with another identity, cluster or address."""
        ...


class ClusterSummary(Protocol):
    """The cluster as this node sees it; ``ClusterViews``."""

    def status(self) -> ClusterStatus:
        """Return what 'edgepipe status' shows."""
        ...

    def for_gateway(self) -> ClusterView:
        """Return what gateways need to know."""
        ...


class EngineRecords(Protocol):
    """The records of served models; ``ServeBook``."""

    def binds(self, node_id: str, engine: EngineState) -> bool:
        """Return whether the engine that a node reports is the recorded one, with the recorded content."""
        ...


class EngineSigns(Protocol):
    """What this node knows of recorded engines from other sources than their records; ``NodePresence``."""

    def is_gone(self, node_id: str) -> bool:
        """Return whether a node is certainly away, or hands its engines over."""
        ...

    def lacks_engine(self, node_id: str, pipeline_id: str) -> bool:
        """Return whether a node has long been without the pipeline's engine."""
        ...

    def engine_state(self, node_id: str, pipeline_id: str) -> str:
        """Return the state that a node reports for its engine; empty without one."""
        ...


class EngineDirectory(Protocol):
    """The engines of the whole cluster; ``NodeHosting``."""

    def has_engine(self, pipeline_id: str) -> bool:
        """Return whether a pipeline's engine runs on a reachable node."""
        ...


class RequestedModels(Protocol):
    """Models that requests load and unload; ``NodeHosting``."""

    def load(self, model: str) -> AsyncGenerator[ServeEvent]:
        """Serve a model in its best placement. End when it answers, or raise the reason why not."""
        ...

    async def unload(self, model: str) -> None:
        """Stop a model that ``load`` served."""
        ...


class BatchReports(Protocol):
    """Takes what the gateway reports of batches with copies; ``BatchSources``."""

    def take(self, report: BatchReport) -> None:
        """Take a report."""
        ...

    def forget(self) -> None:
        """Take note that a new gateway has to report."""
        ...


class Spreading(Protocol):
    """Ways to other nodes for this node's newest state."""

    async def spread(self) -> None:
        """Return when the other nodes know this node's newest state, or after a short limit."""
        ...


class Contacts(Protocol):
    """Addresses of members, and the announcement of a pairing port; ``NodePresence``."""

    def known_addresses(self) -> Mapping[str, str]:
        """Return the members' present or last addresses, by node id."""
        ...

    async def announce_pairing(self, port: int) -> None:
        """Announce this node's pairing port by mDNS; 0: it is closed."""
        ...
