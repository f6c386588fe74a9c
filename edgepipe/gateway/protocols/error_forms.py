"""The form of an error's body: that of the API to which the request's path belongs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse

from edgepipe.gateway.problems import HttpProblem


def problem_response(problem: HttpProblem, *, path: str) -> JSONResponse:
    """Build the response of a problem in the form of the path's API."""
    form = next(form for prefix, form in _FORMS.items() if path.startswith(prefix))
    return JSONResponse(form(problem), status_code=problem.status, headers=dict(problem.headers))


def _ollama_error(problem: HttpProblem) -> dict[str, Any]:
    """Return Ollama's form, which has a message only. The message names the invalid field."""
    param = problem.param or ""
    name = "format" if param.startswith("response_format") else param
    return {"error": problem.message if name in problem.message else f"{name}: {problem.message}"}


_FORMS: Mapping[str, Callable[[HttpProblem], dict[str, Any]]] = {
    "/api/": _ollama_error,
    "": HttpProblem.body,
}
"""The form of errors by the prefix of the path: the first that fits. OpenAI's form is the last."""
