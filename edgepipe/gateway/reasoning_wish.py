"""What a request wants of reasoning (PURE): fields of several servers, read as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from edgepipe.gateway.problems import bad_request
from edgepipe.gateway.schema import ChatBody

T = TypeVar("T")
_SWITCHES = {"enabled": True, "disabled": False}  # adaptive: the model decides


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningWish:
    """What a request says about reasoning. None: nothing."""

    enabled: bool | None = None
    effort: str | None = None
    most_tokens: int | None = None


def reasoning_wish(body: ChatBody) -> ReasoningWish:
    """Read the fields about reasoning. Raises HttpProblem if two of them say different things."""
    thinking, reasoning = body.thinking, body.reasoning
    return ReasoningWish(
        enabled=_one(
            ("enable_thinking", body.enable_thinking),
            ("thinking", _SWITCHES.get(thinking.type) if thinking else None),
            ("reasoning", None if reasoning is None else reasoning.enabled),
        ),
        effort=_one(
            ("reasoning_effort", body.reasoning_effort), ("reasoning", None if reasoning is None else reasoning.effort)
        ),
        most_tokens=_one(
            ("thinking_token_budget", body.thinking_token_budget),
            ("thinking_budget", body.thinking_budget),
            ("thinking", None if thinking is None else thinking.budget_tokens),
            ("reasoning", None if reasoning is None else reasoning.max_tokens),
        ),
    )


def _one(*given: tuple[str, T | None]) -> T | None:
    said = [(name, value) for name, value in given if value is not None]
    for name, value in said[1:]:
        if value != said[0][1]:
            raise bad_request(f"'{name}' and '{said[0][0]}' say different things: send one of them", param=name)
    return said[0][1] if said else None
