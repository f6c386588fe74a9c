"""Every field of a request has a bound, and what lies beyond it is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from edgepipe.errors import PromptTooLong, RequestInvalid
from edgepipe.ids import RequestId, SequenceId
from edgepipe.sampling import GrammarSpec, SamplingParams
from edgepipe.sampling.bounds import Biases, Bound, Flag, ManyTokenIds, ModelBounds, Optional, Text, TokenIds, Within
from edgepipe.sampling.params import SAMPLING_BOUNDS
from edgepipe.wire.intake import (
    REGISTRATION_BOUNDS,
    SUBMISSION_BOUNDS,
    check_submission,
    registration_fault,
    submission_refusal,
)
from edgepipe.wire.registrations import Registration
from edgepipe.wire.requests import Submission

MODEL = ModelBounds(vocab_size=1000, context_length=64)
REQUEST = Submission(request_id=RequestId("a"), prompt=(1, 2, 3), sampling=SamplingParams(), num_choices=2)
ENTRY = Registration(sequence=SequenceId(1), sampling=SamplingParams(), prompt_tokens=3)


def beyond(bound: Bound) -> list[Any]:
    """Values just beyond a bound, and far beyond."""
    match bound:
        case Within():
            lowest = [bound.lowest] if bound.above else []
            return [*lowest, bound.lowest - 1, bound.highest + 1, 2**63 + 2**65, float("nan"), float("inf")]
        case TokenIds():
            most = bound.most if bound.most is not None else MODEL.context_length
            return [(MODEL.vocab_size,), (2_000_000_000,), (-1,), tuple(range(most + 1))]
        case ManyTokenIds():
            return [((1,),) * (bound.most + 1), *(((1,), ids) for ids in beyond(bound.each))]
        case Biases():
            numbers = [((1, number),) for number in beyond(bound.each)]
            ids = [((token, 1.0),) for token in (MODEL.vocab_size, 2_000_000_000, -1)]
            return [*numbers, *ids, ((1, 1.0), (1, 2.0)), tuple((token, 1.0) for token in range(bound.most + 1))]
        case Text():
            return ["x" * (bound.most_bytes + 1), "ß" * (bound.most_bytes // 2 + 1)]
        case _:
            return []


@pytest.mark.parametrize(
    ("kind", "table"),
    [(Submission, SUBMISSION_BOUNDS), (SamplingParams, SAMPLING_BOUNDS), (Registration, REGISTRATION_BOUNDS)],
)
def test_every_field_of_a_request_has_a_bound(kind: type, table: dict[str, Bound]) -> None:
    assert set(table) | {"sampling"} == {field.name for field in fields(kind)} | {"sampling"}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, bound in SUBMISSION_BOUNDS.items() for value in beyond(bound)]
)
def test_a_request_beyond_a_bound_is_refused_by_the_fields_name(name: str, value: Any) -> None:
    refused = submission_refusal(replace(REQUEST, **{name: value}), MODEL)
    assert refused is not None
    assert refused.field == name
    with pytest.raises(RequestInvalid):
        check_submission(replace(REQUEST, **{name: value}), MODEL)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, bound in SAMPLING_BOUNDS.items() for value in beyond(bound)]
)
def test_sampling_beyond_a_bound_is_refused_by_the_fields_name(name: str, value: Any) -> None:
    with pytest.raises(RequestInvalid, match=name):
        check_submission(replace(REQUEST, sampling=replace(SamplingParams(), **{name: value})), MODEL)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, bound in REGISTRATION_BOUNDS.items() for value in beyond(bound)]
)
def test_a_registration_beyond_a_bound_is_a_fault_of_that_sequence(name: str, value: Any) -> None:
    fault = registration_fault(replace(ENTRY, **{name: value}), MODEL)
    assert fault is not None
    assert name in fault.what


def test_a_grammar_is_bounded_in_bytes() -> None:
    bound = SAMPLING_BOUNDS["grammar"]
    assert isinstance(bound, Optional)
    assert isinstance(bound.bound, Text)
    GrammarSpec("x" * bound.bound.most_bytes)
    for text in ("", *beyond(bound.bound)):
        with pytest.raises(RequestInvalid, match="grammar"):
            GrammarSpec(text)


def test_each_kind_of_bound_is_tried() -> None:
    tables = (*SUBMISSION_BOUNDS.values(), *SAMPLING_BOUNDS.values(), *REGISTRATION_BOUNDS.values())
    for bound in tables:
        assert beyond(bound) or isinstance(bound, Flag | Optional), bound


def test_what_is_within_the_bounds_is_taken() -> None:
    sampling = SamplingParams(min_tokens=1, logit_bias=((999, 100.0),), top_p=1.0, seed=2**64 - 1)
    request = replace(REQUEST, sampling=sampling, stop_token_ids=frozenset(range(64)), generated=((1,) * 61,))
    check_submission(request, MODEL)


def test_fields_that_contradict_one_another_are_refused() -> None:
    for generated in ((((1,),) * 3), ((1,) * 62,)):
        refused = submission_refusal(replace(REQUEST, generated=generated), MODEL)
        assert refused is not None
        assert refused.field == "generated"
    with pytest.raises(PromptTooLong):
        check_submission(replace(REQUEST, prompt=(1,) * 64), MODEL)
