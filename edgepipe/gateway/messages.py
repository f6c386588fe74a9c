"""Convert reports of engines and of the daemon (``engine.proto``, ``node.proto``) to the gateway's values."""

from __future__ import annotations

from collections.abc import Iterator

from edgepipe.gateway.engine_types import (
    ChoiceEnded,
    EngineReport,
    PromptRead,
    PromptScored,
    ServedModel,
    TokensArrived,
)
from edgepipe.ids import PipelineId, RequestId
from edgepipe.wire.common import epoch_from_wire, error_from_wire
from edgepipe.wire.sampling import logprobs_from_wire
from edgepipe.wire.v1 import engine_pb2, node_pb2


def events_from_wire(event: engine_pb2.EngineEvent) -> Iterator[EngineReport]:
    """Yield an engine's reports on requests, in order. Raises RemoteProtocolError."""
    for read in event.prompt_reads:
        yield PromptRead(
            request_id=RequestId(read.request_id),
            attempt=read.attempt,
            choice=read.choice,
            num_tokens=read.num_tokens,
        )
    for scores in event.prompt_scores:
        yield PromptScored(
            request_id=RequestId(scores.request_id),
            attempt=scores.attempt,
            choice=scores.choice,
            position=scores.position,
            logprobs=logprobs_from_wire(scores.tokens),
        )
    for tokens in event.tokens:
        yield TokensArrived(
            request_id=RequestId(tokens.request_id),
            attempt=tokens.attempt,
            choice=tokens.choice,
            position=tokens.position,
            ids=tuple(tokens.ids),
            logprobs=logprobs_from_wire(tokens.logprobs),
        )
    for ended in event.ended:
        yield ChoiceEnded(
            request_id=RequestId(ended.request_id),
            attempt=ended.attempt,
            choice=ended.choice,
            reason=ended.reason,
            cached_prompt_tokens=ended.cached_prompt_tokens,
            error=error_from_wire(ended.error) if ended.HasField("error") else None,
        )


def served_models(view: node_pb2.ClusterView) -> list[ServedModel]:
    """Return the models of a cluster view."""
    return [_served(entry) for entry in view.served]


def _served(entry: node_pb2.ServedModel) -> ServedModel:
    engine = entry.engine
    return ServedModel(
        name=engine.model,
        pipeline_id=PipelineId(engine.pipeline_id),
        epoch=epoch_from_wire(engine.epoch),
        state=engine.state,
        address=engine.address,
        certificate=engine.certificate,
        context_length=engine.context_length,
        model_path=entry.model_path,
        manifest_hash=engine.manifest_hash,
        weight_bytes=sum(stage.weight_bytes for stage in engine.stages),
        on_request=entry.on_request,
        num_requests=engine.running + engine.waiting,
        message=engine.message,
        error=error_from_wire(engine.error) if engine.HasField("error") else None,
    )
