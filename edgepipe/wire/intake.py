"""Bounds of requests: tables that the gateway, the engine and the sampling stage each check.

Each process checks for itself, because another node may be old or hostile.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgepipe.errors import PromptTooLong, RequestInvalid
from edgepipe.sampling.bounds import (
    Bound,
    Flag,
    ManyTokenIds,
    ModelBounds,
    Text,
    TokenIds,
    ValueRefusal,
    Within,
    refusal,
)
from edgepipe.sampling.params import MAX_COUNT, SAMPLING_BOUNDS
from edgepipe.wire.registrations import Registration
from edgepipe.wire.requests import Submission
from edgepipe.wire.sizes import MAX_END_IDS

MAX_CHOICES = 128  # choices per request, as in OpenAI's API
MAX_STOP_IDS = 64
MAX_SCORES = 1 << 20  # log-probabilities of prompt and output in one request: 8 MB each, 60 MB as JSON
MAX_REQUEST_IDS = 1_250_000  # ids of a prompt and all choices' output: another attempt sends them in one message
MAX_ID_BYTES = 256  # length of a request's id
_WIRE_MAX = (1 << 32) - 1  # largest integer on the wire

SUBMISSION_BOUNDS: Mapping[str, Bound] = {
    "request_id": Text(MAX_ID_BYTES),
    "attempt": Within(0, _WIRE_MAX),
    "prompt": TokenIds(None),
    "num_choices": Within(1, MAX_CHOICES),
    "generated": ManyTokenIds(MAX_CHOICES, TokenIds(None)),
    "max_tokens": Within(0, MAX_COUNT),
    "ignore_eos": Flag(),
    "stop_token_ids": TokenIds(MAX_STOP_IDS),
    "priority": Within(0, 1),
    "group_tokens": Within(0, MAX_COUNT),
}
"""Bounds of every field of Submission except ``sampling``, which has SAMPLING_BOUNDS."""


REGISTRATION_BOUNDS: Mapping[str, Bound] = {
    "sequence": Within(0, _WIRE_MAX),
    "choice": Within(0, MAX_CHOICES - 1),
    "prompt_tokens": Within(0, _WIRE_MAX),
    "prompt": TokenIds(None),
    "seen": TokenIds(None),
    "generated": TokenIds(None),
    "end_ids": TokenIds(MAX_END_IDS),
    "continues": Flag(),
    "draft": Text(16),
}
"""Bounds of every field of Registration except ``sampling``, which has SAMPLING_BOUNDS."""


def submission_refusal(submission: Submission, model: ModelBounds) -> ValueRefusal | None:
    """Return the first invalid field of a request for this model, or None. Fields of ``sampling`` keep their names."""
    return (
        refusal(submission, SUBMISSION_BOUNDS, model)
        or refusal(submission.sampling, SAMPLING_BOUNDS, model)
        or _contradiction(submission, model)
    )


def check_submission(submission: Submission, model: ModelBounds) -> None:
    """Check a request against this model. Raises RequestInvalid or PromptTooLong."""
    if len(submission.prompt) >= model.context_length:
        raise PromptTooLong(
            f"This model's maximum context length is {model.context_length} tokens",
            fact=f"the prompt has {len(submission.prompt)}, and the answer needs at least one",
            next_step="shorten the prompt",
        )
    if (refused := submission_refusal(submission, model)) is not None:
        raise RequestInvalid(f"{refused.field} cannot be used", fact=refused.fact)


def registration_fault(registration: Registration, model: ModelBounds) -> RequestInvalid | None:
    """Return the reason why a sequence cannot be sampled, or None. Its steps are computed nevertheless."""
    refused = refusal(registration, REGISTRATION_BOUNDS, model) or refusal(
        registration.sampling, SAMPLING_BOUNDS, model
    )
    return None if refused is None else RequestInvalid(f"{refused.field} cannot be used", fact=refused.fact)


def _contradiction(submission: Submission, model: ModelBounds) -> ValueRefusal | None:
    """Return the first contradiction between fields that are each within bounds, or None."""
    if len(submission.generated) > submission.num_choices:
        return ValueRefusal(
            "generated",
            f"it continues more choices than the request has: {len(submission.generated)} of {submission.num_choices}",
        )
    num_ids = len(submission.prompt) + sum(map(len, submission.generated))
    if num_ids > MAX_REQUEST_IDS:
        return ValueRefusal(
            "prompt", f"prompt and output have {num_ids} token ids; at most {MAX_REQUEST_IDS} can be used"
        )
    if submission.sampling.prompt_logprobs:
        scores = len(submission.prompt) * (1 + submission.sampling.top_logprobs)
        if scores > MAX_SCORES:
            return ValueRefusal("prompt_logprobs", f"they are {scores} numbers; at most {MAX_SCORES} are allowed")
    longest = max((len(ids) for ids in submission.generated), default=0)
    if len(submission.prompt) + longest > model.context_length:
        return ValueRefusal(
            "generated",
            f"prompt and output have {len(submission.prompt) + longest} tokens; the context has {model.context_length}",
        )
    return None
