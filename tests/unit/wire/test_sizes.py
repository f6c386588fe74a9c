"""No sender makes a message larger than its bound, whatever it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.engine.settings import EngineLimits
from edgepipe.errors import StepFailed
from edgepipe.ids import EngineId, Epoch, RequestId, SequenceId, StepId
from edgepipe.link.channels import MAX_MESSAGE_BYTES
from edgepipe.sampling import GrammarSpec, PromptLogprobs, SamplingParams, TokenLogprobs
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.sampling.params import MAX_GRAMMAR_BYTES
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.intake import MAX_ID_BYTES, MAX_REQUEST_IDS, check_submission, submission_refusal
from edgepipe.wire.registrations import Registration, registration_bytes, registrations_from_wire, registrations_to_wire
from edgepipe.wire.reports import StepDone, done_to_wire
from edgepipe.wire.requests import Submission, command_to_wire
from edgepipe.wire.sizes import MAX_END_IDS, PACKED_BYTES
from edgepipe.wire.v1 import stage_pb2

EPOCH = epoch_to_wire(Epoch(1, EngineId("engine-0123456789abcdef")))
VOCABULARY = 262_144
PENALISED = SamplingParams(repetition_penalty=1.1)


def pack(registrations: Sequence[Registration]) -> list[stage_pb2.ControlMessage]:
    messages = registrations_to_wire(registrations, epoch=EPOCH, with_sampling=True)
    assert all(message.ByteSize() <= PACKED_BYTES for message in messages)
    return messages


def unpack(messages: Sequence[stage_pb2.ControlMessage]) -> list[Registration]:
    """What a stage makes of them."""
    whole: dict[SequenceId, Registration] = {}
    for message in messages:
        for part in registrations_from_wire(message.register).sequences:
            whole[part.sequence] = whole[part.sequence].joined(part) if part.continues else part
    return list(whole.values())


def test_sequences_that_begin_at_once_are_told_in_messages_of_one_mebibyte() -> None:
    """A recovery: 80 requests with grammars of 80 KB, and 256 of 5,500 tokens under a penalty."""
    bound = SamplingParams(grammar=GrammarSpec("x" * 80_000))
    grammars = [Registration(sequence=SequenceId(n), sampling=bound, prompt_tokens=9) for n in range(80)]
    seen = tuple(range(VOCABULARY - 5500 * 40, VOCABULARY, 40))
    penalised = [
        Registration(sequence=SequenceId(n), sampling=PENALISED, prompt_tokens=5500, seen=seen, generated=seen)
        for n in range(80, 336)
    ]
    messages = pack(grammars + penalised)
    assert unpack(messages) == grammars + penalised
    total = sum(message.ByteSize() for message in messages)
    assert len(messages) <= 2 * total // PACKED_BYTES + 1, "they are packed well"


def test_one_sequence_with_a_context_of_a_million_tokens_is_told_in_parts() -> None:
    ids = tuple(range(VOCABULARY))
    sampling = replace(PENALISED, prompt_logprobs=True, min_tokens=5, grammar=GrammarSpec("x" * MAX_GRAMMAR_BYTES))
    registration = Registration(
        sequence=SequenceId(1),
        sampling=sampling,
        prompt_tokens=10**6,
        prompt=ids * 2,
        seen=ids,
        generated=ids * 2,
        end_ids=ids[-MAX_END_IDS:],
    )
    messages = pack([registration])
    assert len(messages) > 1
    assert unpack(messages) == [registration]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_comes_out_of_the_messages_is_what_went_in(data: st.DataObject) -> None:
    registrations: list[Registration] = []
    for number in range(data.draw(st.integers(0, 4))):
        grammar = data.draw(
            st.sampled_from([None, GrammarSpec("g" * 200), GrammarSpec("ß" * (MAX_GRAMMAR_BYTES // 2))])
        )
        biased = tuple((VOCABULARY - 1 - token, -100.0) for token in range(data.draw(st.sampled_from([0, 300]))))
        sampling = SamplingParams(
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.1])),
            prompt_logprobs=data.draw(st.booleans()),
            min_tokens=data.draw(st.integers(0, 1)),
            logit_bias=biased,
            grammar=grammar,
        )
        lengths = st.sampled_from([0, 1, 104_857, 104_858])
        length, output = data.draw(lengths), data.draw(lengths)
        ids = tuple(range(VOCABULARY - length, VOCABULARY))
        registrations.append(
            Registration(
                sequence=SequenceId((1 << 32) - 1 - number),
                sampling=sampling,
                choice=127,
                prompt_tokens=length,
                prompt=ids if sampling.prompt_logprobs else (),
                seen=ids if sampling.penalises_prompt else (),
                generated=(VOCABULARY - 1,) * output if sampling.needs_output else (),
                end_ids=tuple(range(VOCABULARY - MAX_END_IDS, VOCABULARY)) if sampling.min_tokens else (),
            )
        )
        fixed, per_token = registration_bytes(sampling, prompt_tokens=length, vocab_size=VOCABULARY)
        size = sum(message.ByteSize() for message in pack(registrations[-1:]))
        assert size <= fixed + per_token * output, "the scheduler is told too little"
    assert unpack(pack(registrations)) == registrations


def test_a_step_that_scores_and_fails_as_much_as_it_can_is_told_in_one_message() -> None:
    rows, tokens = EngineLimits().max_running, EngineLimits().max_prefill_tokens
    entry = TokenLogprobs(-12.5, tuple((VOCABULARY - 1 - rank, -float(rank)) for rank in range(20)))
    long = "☃" * 100_000
    error = StepFailed(long, fact=long, next_step=long, node=long, stage=long, request_id=long)
    done = StepDone(
        epoch=Epoch(1, EngineId("engine-0123456789abcdef")),
        step=StepId(1 << 40),
        ids=((VOCABULARY - 1,),) * rows,
        logprobs=tuple((row, entry) for row in range(rows)),
        prompt_logprobs=tuple(
            (SequenceId((1 << 32) - 1), PromptLogprobs(position=100_000, tokens=(entry,) * (tokens // rows)))
            for _ in range(rows)
        ),
        failures=tuple((row, error) for row in range(rows)),
    )
    assert done_to_wire(done).ByteSize() <= 2 * PACKED_BYTES


@pytest.mark.parametrize("num_choices", [1, 8, 128])
def test_the_largest_request_and_its_next_attempt_fit_into_one_message(num_choices: int) -> None:
    model = ModelBounds(vocab_size=1 << 21, context_length=MAX_REQUEST_IDS)
    ids = (model.vocab_size - 1,)
    each = (MAX_REQUEST_IDS - 1000) // num_choices
    sampling = SamplingParams(
        grammar=GrammarSpec("ß" * (MAX_GRAMMAR_BYTES // 2)), logit_bias=tuple((n, -1.5) for n in range(300))
    )
    request = Submission(
        request_id=RequestId("r" * MAX_ID_BYTES),
        attempt=1 << 31,
        prompt=ids * 1000,
        num_choices=num_choices,
        generated=(ids * each,) * num_choices,
        stop_token_ids=frozenset(range(64)),
        sampling=sampling,
    )
    check_submission(request, model)
    assert command_to_wire(request).ByteSize() <= MAX_MESSAGE_BYTES
    refused = submission_refusal(replace(request, prompt=ids * 2000), model)
    assert refused is not None


def test_what_is_packed_is_well_within_what_grpc_takes() -> None:
    assert 2 * PACKED_BYTES <= MAX_MESSAGE_BYTES
