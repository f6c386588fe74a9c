"""Errors in Anthropic's form. PURE."""

from __future__ import annotations

from typing import Any

from edgepipe.errors import CapacityError, GrammarNotReady, NoFeasiblePlacement, PromptTooLong
from edgepipe.gateway.problems import HttpProblem

OVERLOADED = 529  # Anthropic's status; its clients wait and try again
_BUSY_CODES = ("busy", "too_many_connections")  # codes of this machine's own problems

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def anthropic_status(problem: HttpProblem) -> int:
    """Return the status of a problem: instead of 503, 529 if there is too much to do, else 500."""
    if problem.status != 503:
        return problem.status
    return OVERLOADED if _is_overload(problem) else 500


def _is_overload(problem: HttpProblem) -> bool:
    """Return whether the request would succeed if there were less to do, or later."""
    error = problem.error
    if error is None:
        return problem.code in _BUSY_CODES
    return isinstance(error, CapacityError | GrammarNotReady) and not isinstance(error, NoFeasiblePlacement)


def anthropic_error(problem: HttpProblem) -> dict[str, Any]:
    """Return a problem's body. The message names the invalid field: the form has no place for it."""
    status = anthropic_status(problem)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(problem)}}


def _message(problem: HttpProblem) -> str:
    """Return the message. Claude Code reads the numbers of a prompt that is too long, to shorten the chat."""
    error = problem.error
    if isinstance(error, PromptTooLong) and error.most_tokens:
        return f"prompt is too long: {error.num_tokens} tokens > {error.most_tokens} maximum"
    param = problem.param or ""
    return problem.message if param in problem.message else f"{param}: {problem.message}"
