"""Endpoints: one definition gives the route and the entry in the API's document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str  # Starlette's form: {id:path} takes slashes
    handler: Handler
    group: str
    summary: str
    body: type[BaseModel] | None = None
    form: dict[str, Any] | None = None  # JSON schema of a multipart/form-data body
    answer: dict[str, Any] | None = None  # JSON schema of a 200; None: no JSON
    streams: str = ""  # media type of a streamed answer
    media_type: str = "application/json"
    query: tuple[str, ...] = ()  # optional parameters, all of them texts
    open: bool = False  # needs no key


def fields(*required: str, **types: str) -> dict[str, Any]:
    """Build the schema of an object: its required names, and the types of some names."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "required": [*required], "properties": properties}
