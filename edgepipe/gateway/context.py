"""Share of a model's context that a request gets."""

from __future__ import annotations

from edgepipe.errors import PromptTooLong, RequestInvalid
from edgepipe.gateway.problems import from_error


def check_length(num_prompt_tokens: int, context_length: int, *, wanted: int | None = None, param: str) -> int:
    """Call ``limit_tokens``; raise its errors as HttpProblem with the field."""
    try:
        return limit_tokens(num_prompt_tokens=num_prompt_tokens, wanted=wanted, context_length=context_length)
    except RequestInvalid as exc:
        raise from_error(exc, param=param) from exc


def limit_tokens(*, num_prompt_tokens: int, wanted: int | None, context_length: int) -> int:
    """Return the output tokens of a request: ``wanted``, at most the rest of the context after the prompt.

    Raises PromptTooLong, and RequestInvalid for an empty prompt.
    """
    if num_prompt_tokens == 0:
        raise RequestInvalid("the prompt is empty", next_step="send at least one token")
    left = context_length - num_prompt_tokens
    if left < 1:
        raise prompt_too_long(num_prompt_tokens, context_length)
    return min(wanted, left) if wanted is not None else left


def prompt_too_long(num_prompt_tokens: int, context_length: int) -> PromptTooLong:
    """Build the error of a prompt that leaves no room for an answer. Clients search for its first words."""
    error = PromptTooLong(
        f"This model's maximum context length is {context_length} tokens",
        fact=f"the prompt has {num_prompt_tokens} tokens; context {context_length}, one of them for the answer",
        next_step=f"shorten the prompt by {num_prompt_tokens + 1 - context_length} tokens",
    )
    error.num_tokens, error.most_tokens = num_prompt_tokens, context_length - 1
    return error
