"""What engines, gateways and daemons tell each other survives the wire."""

from __future__ import annotations

from dataclasses import fields

import pytest
from google.protobuf.message import Message

from edgepipe.backend.types import ActivationType
from edgepipe.errors import RemoteProtocolError, RequestInvalid, StageLost
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId, RequestId
from edgepipe.model.facts import LayerRange, make_slices
from edgepipe.sampling import GrammarSpec, SamplingParams
from edgepipe.wire.common import epoch_from_wire, error_from_wire, slices_from_wire
from edgepipe.wire.engines import (
    EngineState,
    ServeSpec,
    StagePlacement,
    StageState,
    engine_state_to_wire,
    serve_spec_from_wire,
    serve_spec_to_wire,
)
from edgepipe.wire.requests import (
    Cancellation,
    Resumption,
    Submission,
    cancellation_from_wire,
    command_to_wire,
    hello_from_wire,
    resumption_from_wire,
    submission_from_wire,
)
from edgepipe.wire.v1 import common_pb2, engine_pb2, node_pb2

SLICES = make_slices([LayerRange(0, 3), LayerRange(3, 8)], 8)


def test_a_submission_survives() -> None:
    submission = Submission(
        request_id=RequestId("r"),
        attempt=3,
        prompt=(1, 70_000, 2),
        num_choices=2,
        generated=((4, 5), ()),
        max_tokens=9,
        ignore_eos=True,
        stop_token_ids=frozenset({8, 3}),
        sampling=SamplingParams(
            temperature=0.7,
            seed=2**64 - 1,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            frequency_penalty=-0.3,
            presence_penalty=1.2,
            repetition_penalty=1.1,
            logit_bias=((7, -100.0), (2, 0.1)),
            logprobs=True,
            top_logprobs=3,
            prompt_logprobs=True,
            min_tokens=4,
            grammar=GrammarSpec("start: TEXT"),
        ),
        priority=1,
    )
    assert submission_from_wire(command_to_wire(submission).submit) == submission


def test_cancel_and_resume_survive() -> None:
    cancellation = Cancellation(request_id=RequestId("r"), attempt=2, choice=1, at_position=17)
    resumption = Resumption(request_id=RequestId("r"), attempt=2, have=(3, 0))
    assert cancellation_from_wire(command_to_wire(cancellation).cancel) == cancellation
    assert resumption_from_wire(command_to_wire(resumption).resume) == resumption


def test_a_submission_that_cannot_be_sampled_is_the_senders_fault() -> None:
    message = engine_pb2.Submit(prompt=[1], sampling=common_pb2.SamplingParams(temperature=float("nan")))
    with pytest.raises(RequestInvalid):
        submission_from_wire(message)


def test_a_stream_begins_with_hello() -> None:
    with pytest.raises(RemoteProtocolError):
        hello_from_wire(engine_pb2.GatewayMessage(submit=engine_pb2.Submit()))


def test_a_serve_spec_survives() -> None:
    spec = ServeSpec(
        model="m",
        manifest_hash="abc",
        stages=tuple(StagePlacement(node_id=NodeId(f"n{i}"), slices=(part,)) for i, part in enumerate(SLICES)),
        micro_batches=3,
        context_length=100,
        kv_tokens=4096,
        dtype="float32",
        activation_type=ActivationType.FLOAT32,
    )
    assert serve_spec_from_wire(serve_spec_to_wire(spec)) == spec


def test_a_spec_of_few_words_means_the_usual() -> None:
    spec = serve_spec_from_wire(node_pb2.ServeSpec(model="m"))
    assert (spec.dtype, spec.activation_type) == ("auto", ActivationType.BF16)


def assert_told(state: EngineState | StageState, message: Message, *, but: set[str]) -> None:
    """Every field of ours stands in the message under its name, ``but`` those of another form."""
    for name in {field.name for field in fields(state)} - but:
        told, ours = getattr(message, name), getattr(state, name)
        assert (tuple(told) if isinstance(ours, tuple) else told) == ours, name


def test_an_engines_state_is_told_whole() -> None:
    state = EngineState(
        model="m",
        pipeline_id=PipelineId("p"),
        epoch=Epoch(4, EngineId("e")),
        state="failed",
        micro_batches=2,
        in_flight=1,
        running=5,
        waiting=6,
        num_blocks=100,
        free_blocks=40,
        block_size=16,
        tokens_per_s=12.5,
        stages=(
            StageState(
                node_id=NodeId("n"),
                slices=SLICES[:1],
                busy=0.5,
                step_ms=3.25,
                one_way_ms=0.5,
                computed_s=1.5,
                bubble_s=0.25,
                hop_bytes=7,
                hop_latency_counts=(1, 0, 2),
                hop_latency_s=0.5,
            ),
        ),
        context_length=2048,
        address="127.0.0.1:1",
        manifest_hash="abc",
        message="loading",
        progress=0.25,
        why="measured",
        bottleneck="link 0-1",
        predicted_tokens_per_s=40.5,
        latency_ms=2.5,
        preemptions=3,
        admitted_tokens=80,
        cached_tokens=30,
    )
    message = engine_state_to_wire(state)
    assert epoch_from_wire(message.epoch) == state.epoch
    assert not message.HasField("error")
    assert_told(state, message, but={"epoch", "error", "stages"})
    for stage, told in zip(state.stages, message.stages, strict=True):
        assert slices_from_wire(told.slices) == stage.slices
        assert_told(stage, told, but={"slices"})


def test_an_engines_error_survives() -> None:
    state = EngineState(
        model="m",
        pipeline_id=PipelineId("p"),
        epoch=Epoch(1, EngineId("e")),
        state="failed",
        error=StageLost("gone", fact="since now", node="n", stage="stage 1"),
    )
    error = error_from_wire(engine_state_to_wire(state).error)
    assert isinstance(error, StageLost)
    assert (error.what, error.fact, error.node, error.stage) == ("gone", "since now", "n", "stage 1")
