"""What engines and the daemon tell, from ``engine.proto`` and ``node.proto`` to the gateway's values."""

from __future__ import annotations

from edgepipe.gateway.engine_types import ChoiceEnded, ServedModel, TokensArrived
from edgepipe.ids import PipelineId, RequestId
from edgepipe.wire.common import error_from_wire
from edgepipe.wire.v1 import engine_pb2, node_pb2


def event_from_wire(event: engine_pb2.EngineEvent) -> TokensArrived | ChoiceEnded | None:
    """What an engine reports of a request; None for messages about nothing that waits here."""
    kind = event.WhichOneof("message")
    if kind == "tokens":
        tokens = event.tokens
        return TokensArrived(
            request_id=RequestId(tokens.request_id),
            choice=tokens.choice,
            position=tokens.position,
            ids=tuple(tokens.ids),
        )
    if kind == "ended":
        ended = event.ended
        return ChoiceEnded(
            request_id=RequestId(ended.request_id),
            choice=ended.choice,
            reason=ended.reason,
            cached_prompt_tokens=ended.cached_prompt_tokens,
            error=error_from_wire(ended.error) if ended.HasField("error") else None,
        )
    return None


def served_models(view: node_pb2.ClusterView) -> list[ServedModel]:
    """The models that a cluster view tells of."""
    return [_served(entry) for entry in view.served]


def _served(entry: node_pb2.ServedModel) -> ServedModel:
    engine = entry.engine
    return ServedModel(
        name=engine.model,
        pipeline_id=PipelineId(engine.pipeline_id),
        engine_id=engine.epoch.engine_id,
        state=engine.state,
        address=engine.address,
        context_length=engine.context_length,
        model_path=entry.model_path,
        message=engine.message,
        error=error_from_wire(engine.error) if engine.HasField("error") else None,
    )
