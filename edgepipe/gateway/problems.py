"""Errors of requests. ``protocols/error_forms.py`` has the forms of other APIs than OpenAI's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgepipe.errors import EdgepipeError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 1  # a slot is usually free again after one short answer


@dataclass(slots=True, kw_only=True)
class HttpProblem(Exception):
    """Error of a request, with its HTTP status. The routing layer turns it into a response."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    # The problem's cause; the response includes its parts, for edgepipe's own clients.
    error: EdgepipeError | None = None

    def body(self) -> dict[str, Any]:
        """Build the body in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        fields: dict[str, Any] = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if self.error is not None:
            parts = {"what": self.error.what, "fact": self.error.fact, "next_step": self.error.next_step}
            fields["edgepipe"] = parts | {"node": self.error.node, "stage": self.error.stage}
        return {"error": fields}

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> HttpProblem:
    """Build the problem of an invalid body or field."""
    return HttpProblem(status=400, message=message, param=param, code=code)


def busy(message: str) -> HttpProblem:
    """Build the problem that this machine is overloaded now."""
    return HttpProblem(status=503, message=message, code="busy", headers={"Retry-After": str(RETRY_AFTER_S)})


def from_error(error: EdgepipeError, *, param: str | None = None) -> HttpProblem:
    """Convert any EdgepipeError; capacity errors get Retry-After."""
    after_s = max(RETRY_AFTER_S, math.ceil(error.retry_after_s))
    retry = {"Retry-After": str(after_s)} if error.http_status in (429, 503) else {}
    message = ". ".join(line.rstrip(".") for line in error.lines())
    return HttpProblem(
        status=error.http_status, message=message, code=error.code, param=param, headers=retry, error=error
    )
