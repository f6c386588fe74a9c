"""Parts of a stage that outlive an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgepipe.clock import Clock
from edgepipe.link.protocol import OnSample, Outgoing, RingTarget
from edgepipe.stage.compute import ComputeThread
from edgepipe.stage.grammar_builds import GrammarBuilds
from edgepipe.stage.sampler import SamplerPool
from edgepipe.stage.trace import Trace


class MakeLink(Protocol):
    """Creates the sending end of a link; called on the loop."""

    def __call__(self, target: RingTarget, *, on_sample: OnSample) -> Outgoing:
        """Return a sender that does not run yet."""
        ...


@dataclass(slots=True)
class Counters:
    """Counts over all epochs of a stage; written on the loop only."""

    received: int = 0  # plans accepted
    sent: int = 0  # steps passed to the next stage or reported as done
    repeats: int = 0  # repeated plans, dropped
    strays: int = 0  # plans and frames of other epochs, dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Parts of a stage that outlive an epoch."""

    compute: ComputeThread
    samplers: SamplerPool
    grammars: GrammarBuilds
    clock: Clock
    trace: Trace
    counters: Counters
    dial: MakeLink
    connect_s: float  # time for the next stage to open its end of the link
    node: str  # name for errors
    stage: str
