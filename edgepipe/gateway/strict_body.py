"""The base of all bodies, and what a client reads about a field that a body refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from edgepipe.gateway.misspelt import misspelt
from edgepipe.gateway.other_fields import (
    NO_EFFECT,
    RefusedFields,
)
from edgepipe.gateway.problems import HttpProblem, bad_request

BodyT = TypeVar("BodyT", bound="StrictBody")


_MISFIT, _UNSUPPORTED = "misfit", "unsupported"


def misfit(field: str, message: str, *, kind: Literal["misfit", "unsupported"] = _MISFIT) -> PydanticCustomError:
    """Make the error of a field that contradicts another one, or that is not supported."""
    return PydanticCustomError(kind, "{message}", {"field": field, "message": message})


class StrictBody(BaseModel):
    """Base of bodies, without conversion of types. Refuses other servers' fields that would change the answer.

    Ignores unknown fields, as OpenAI's clients expect; ``spelt``: but no misspelt ones.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    refused: ClassVar[RefusedFields] = {}
    spelt: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _no_refused_field(cls, raw: Any) -> Any:
        given = cast("dict[str, object]", raw) if isinstance(raw, dict) else dict[str, object]()
        for name, refused in cls.refused.items():
            if not refused.takes(given.get(name)):
                raise misfit(name, refused.message(name), kind=_UNSUPPORTED)
        known = {*cls.model_fields, *cls.refused, *NO_EFFECT} if cls.spelt else ()
        named = [name for name, value in given.items() if value is not None]
        if cls.spelt and (found := misspelt(named, known)) is not None:
            raise misfit(found[0], f"'{found[0]}' is unknown; send {found[1]}", kind=_UNSUPPORTED)
        return cast("object", raw)


class WithoutNulls(StrictBody):
    """A body or a part of one in which null means absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {name: value for name, value in cast("dict[str, object]", raw).items() if value is not None}


def validate(kind: type[BodyT], raw: Mapping[str, Any]) -> BodyT:
    """Return the checked body. Raises HttpProblem 400 that names the first bad field."""
    try:
        return kind.model_validate(raw)
    except ValidationError as exc:
        raise _problem(exc) from exc


def _problem(exc: ValidationError) -> HttpProblem:
    first = exc.errors(include_url=False, include_input=False)[0]
    misfit = first["type"] in (_MISFIT, _UNSUPPORTED)
    field = str(first.get("ctx", {}).get("field", "")).split(".") if misfit else []
    place = (*first["loc"], *(int(name) if name.isdecimal() else name for name in field))
    names = [str(part) for part in place if isinstance(part, int) or part.isidentifier()]
    param = ".".join(name for name in names if name not in _TYPE_NAMES)
    message = first["msg"].removeprefix("Value error, ")
    code = _CODES.get(first["type"], "invalid_value")
    return bad_request(message if misfit else f"{param}: {message}", param=param or None, code=code)


_CODES = {"missing": "missing_required_parameter", _UNSUPPORTED: "unsupported_parameter"}
_TYPE_NAMES = ("str", "list", "int", "float", "dict")
"""Tags of union members in pydantic's error locations; they are no fields of requests."""
