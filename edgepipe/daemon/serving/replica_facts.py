"""PURE: the part of a pipeline's record that depends on the model's other pipelines.

Each record has a place of its own, which never changes. Pipelines come and go, so places may have gaps. For people,
pipelines are numbered from 1 on without gaps, in the order of ``replica_pipelines``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgepipe.ids import PipelineId
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.serving import ServeBody


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What the records of all pipelines of a model say alike, and each pipeline's share."""

    pipelines: tuple[PipelineId, ...]  # ordered by their places
    shares: Mapping[PipelineId, float] = field(default_factory=dict[PipelineId, float])  # parts of the conversations
    auto: bool = False  # the planner chooses their number
    concurrency: int = 0  # chats for which they were planned; 0: the default

    def of(self, spec: ServeSpec, pipeline_id: PipelineId, *, place: int) -> ServeSpec:
        """Return a pipeline's spec with these facts."""
        several = len(self.pipelines) > 1
        return replace(
            spec,
            num_replicas=len(self.pipelines) if several else 0,
            replica=place if several or place > 1 else 0,
            replica_pipelines=self.pipelines if several else (),
            replica_share=self.shares.get(pipeline_id, 0.0) if several else 0.0,
            auto_replicas=self.auto,
            concurrency=self.concurrency,
        )


def with_facts_of(spec: ServeSpec, held: ServeSpec) -> ServeSpec:
    """Return a spec with the facts of the record in effect: an engine has those of its start."""
    return replace(
        spec,
        num_replicas=held.num_replicas,
        replica=held.replica,
        replica_pipelines=held.replica_pipelines,
        replica_share=held.replica_share,
        auto_replicas=held.auto_replicas,
        concurrency=held.concurrency,
    )


def number_of(pipeline_id: PipelineId, first: ServeBody | None) -> int:
    """Return which of the model's pipelines this is, from 1 on; 0: the only one, or none that counts.

    ``first``: the record that says which pipelines count, see ``serve_rules.lead``.
    """
    pipelines = first.spec.replica_pipelines if first is not None else ()
    return pipelines.index(pipeline_id) + 1 if pipeline_id in pipelines else 0


def as_recorded(engine: EngineState, body: ServeBody | None, first: ServeBody | None) -> EngineState:
    """Return an engine's state with what the records say of the model's pipelines. ``first``: as for ``number_of``."""
    number = number_of(engine.pipeline_id, first)
    return replace(
        engine,
        num_replicas=len(first.spec.replica_pipelines) if first is not None and number else 0,
        replica=number,
        replica_share=body.spec.replica_share if body is not None and number else 0.0,
    )
