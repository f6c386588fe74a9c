"""What engines and gateways tell each other survives the wire."""

from __future__ import annotations

import pytest

from edgepipe.errors import RemoteProtocolError, RequestInvalid, StageLost
from edgepipe.ids import EngineId, Epoch, PipelineId, RequestId
from edgepipe.sampling import GrammarSpec, SamplingParams
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.engines import EngineState
from edgepipe.wire.requests import (
    Cancellation,
    Resumption,
    Submission,
    command_to_wire,
    opening_hello,
    submission_from_wire,
)
from edgepipe.wire.v1 import common_pb2, engine_pb2


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
        group_tokens=32,
    )
    assert submission_from_wire(command_to_wire(submission).submit) == submission


def test_cancel_and_resume_survive() -> None:
    cancellation = Cancellation(request_id=RequestId("r"), attempt=2, choice=1, at_position=17)
    resumption = Resumption(request_id=RequestId("r"), attempt=2, have=(3, 0))
    assert from_wire(command_to_wire(cancellation).cancel, Cancellation) == cancellation
    assert from_wire(command_to_wire(resumption).resume, Resumption) == resumption


def test_a_submission_that_cannot_be_sampled_is_the_senders_fault() -> None:
    message = engine_pb2.Submit(prompt=[1], sampling=common_pb2.SamplingParams(temperature=float("nan")))
    with pytest.raises(RequestInvalid):
        submission_from_wire(message)


def test_a_stream_begins_with_hello() -> None:
    with pytest.raises(RemoteProtocolError):
        opening_hello(engine_pb2.GatewayMessage(submit=engine_pb2.Submit()))


def test_an_engines_error_survives() -> None:
    state = EngineState(
        model="m",
        pipeline_id=PipelineId("p"),
        epoch=Epoch(1, EngineId("e")),
        state="failed",
        error=StageLost("gone", fact="since now", node="n", stage="stage 1"),
    )
    error = from_wire(to_wire(state, engine_pb2.EngineState), EngineState).error
    assert isinstance(error, StageLost)
    assert (error.what, error.fact, error.node, error.stage) == ("gone", "since now", "n", "stage 1")
