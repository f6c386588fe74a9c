"""Between the gateway's values and the messages of ``engine.proto`` and ``node.proto``."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.gateway.engine_types import ChoiceEnded, EngineRequest, ServedModel, TokensArrived
from edgepipe.ids import PipelineId, RequestId
from edgepipe.wire.common import error_from_wire
from edgepipe.wire.v1 import common_pb2, engine_pb2, node_pb2

FIRST_ATTEMPT = 1  # a new engine gets the next one


def submit_message(request: EngineRequest) -> engine_pb2.GatewayMessage:
    """A new request."""
    sampling = common_pb2.SamplingParams(temperature=request.temperature, seed=request.seed)
    return engine_pb2.GatewayMessage(
        submit=engine_pb2.Submit(
            request_id=request.request_id,
            attempt=FIRST_ATTEMPT,
            prompt=request.prompt,
            num_choices=request.num_choices,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=request.stop_token_ids,
            sampling=sampling,
        )
    )


def resume_message(request_id: RequestId, have: Sequence[int]) -> engine_pb2.GatewayMessage:
    """After a broken stream: what is already here."""
    return engine_pb2.GatewayMessage(resume=engine_pb2.Resume(request_id=request_id, attempt=FIRST_ATTEMPT, have=have))


def cancel_message(request_id: RequestId, *, choice: int, at_position: int) -> engine_pb2.GatewayMessage:
    """The first ``at_position`` output tokens of the choice are wanted and no more."""
    return engine_pb2.GatewayMessage(
        cancel=engine_pb2.Cancel(request_id=request_id, attempt=FIRST_ATTEMPT, choice=choice, at_position=at_position)
    )


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
