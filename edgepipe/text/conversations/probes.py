"""Standard conversations, which show what a chat template accepts. PURE.

Each text is a word that no template has, so a rendering shows which texts the template left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from edgepipe.text.conversations.roles import Turn

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookqx",
        "description": "Find it",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "place"}}},
    },
}
ANSWER = "answerqx"
RESULT = "resultqx"
USER = "userqx"
REASONING = "reasonqx"
_SYSTEM = "systemqx"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConversation:
    """A conversation to render."""

    name: str
    turns: tuple[Turn, ...]
    tools: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    may_lack: tuple[str, ...] = ()  # texts that a complete rendering may leave out

    @property
    def odd(self) -> bool:
        """Whether arguments are no object. They may be JSON within JSON."""
        return self.name.startswith("arguments")

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a complete rendering has. Templates may leave out the reasoning of earlier turns."""
        marks = [turn["content"] for turn in self.turns if turn["content"] and turn["content"] not in self.may_lack]
        for turn in self.turns:
            for call in turn.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                marks.append(call["function"]["name"])
                marks += cast("dict[str, str]", arguments).values() if isinstance(arguments, dict) else ["plaqx"]
        return (*marks, *([TOOL["function"]["name"]] if self.tools else []))


def _user(number: int = 1) -> Turn:
    return {"role": "user", "content": f"{USER}{number}"}


def _said(number: int = 1, **more: Any) -> Turn:
    return {"role": "assistant", "content": f"{ANSWER}{number}"} | more


def _system(number: int = 1, role: str = "system") -> Turn:
    return {"role": role, "content": f"{_SYSTEM}{number}"}


def _called(*numbers: int, content: str | None = None, **more: Any) -> Turn:
    calls = [_call(number, {"at": f"placeqx{number}"}) for number in numbers]
    return {"role": "assistant", "content": content, "tool_calls": calls} | more


def _call(number: int, arguments: object) -> dict[str, Any]:
    return {
        "id": f"call_{number:020d}",
        "type": "function",
        "function": {"name": f"callqx{number}", "arguments": arguments},
    }


def _result(number: int) -> Turn:
    return {"role": "tool", "tool_call_id": f"call_{number:020d}", "content": f"{RESULT}{number}"}


def _odd(arguments: object) -> Turn:
    return {"role": "assistant", "content": None, "tool_calls": [_call(1, arguments)]}


def _effort(level: str) -> ProbeConversation:
    return ProbeConversation(name=f"effort {level}", turns=(_user(),), keywords={"reasoning_effort": level})


LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of ``reasoning_effort`` that clients send, from least to most."""

_LATER_TEXT = "call with text, dialogue"

_CHATS: Mapping[str, tuple[Turn, ...]] = {
    "question": (_user(),),
    "dialogue": (_user(), _said(), _user(2)),
    "system": (_system(), _user()),
    "system, dialogue": (_system(), _user(), _said(), _user(2)),
    "developer": (_system(role="developer"), _user()),
    "two systems": (_system(), _system(2), _user()),
    "late system": (_user(), _said(), _system(), _user(2)),
    "two systems, one late": (_system(), _user(), _said(), _system(2), _user(2)),
    "system after a question": (_user(), _system(), _user(2)),
    "system last": (_user(), _system()),
    "two users": (_user(), _user(2)),
    "two users later": (_user(), _said(), _user(2), _user(3)),
    "two assistants": (_user(), _said(), _said(2), _user(2)),
    "assistant last": (_user(), _said()),
    "greeting": (_said(), _user()),
    "system, greeting": (_system(), _said(), _user()),
    "greeting, dialogue": (_said(), _user(), _said(2), _user(2)),
    "system alone": (_system(),),
    "answer without text": (_user(), {"role": "assistant", "content": None}, _user(2)),
    "empty list of calls": (_user(), _said(tool_calls=[]), _user(2)),
    "reasoning": (_user(), _said(reasoning_content=REASONING), _user(2)),
}
_CALLS: Mapping[str, tuple[Turn, ...]] = {
    "call": (_user(), _called(1), _result(1)),
    "call, dialogue": (_user(), _called(1), _result(1), _said(), _user(2)),
    "call with empty text": (_user(), _called(1, content=""), _result(1), _said(), _user(2)),
    "call with text": (_user(), _called(1, content=f"{ANSWER}1"), _result(1)),
    _LATER_TEXT: (_user(), _called(1, content=f"{ANSWER}1"), _result(1), _said(2), _user(2)),
    "call with reasoning": (_user(), _called(1, reasoning_content=REASONING), _result(1)),
    "call with reasoning, text": (
        _user(),
        _called(1, content=f"{ANSWER}1", reasoning_content=REASONING),
        _result(1),
    ),
    "system, call": (_system(), _user(), _called(1), _result(1), _said(), _user(2)),
    "two calls in turn": (_user(), _called(1), _result(1), _called(2), _result(2)),
    "parallel calls": (_user(), _called(1, 2), _result(1), _result(2)),
    "parallel calls, dialogue": (_user(), _called(1, 2), _result(1), _result(2), _said(), _user(2)),
    "call without result": (_user(), _called(1), _user(2)),
    "user after a result": (_user(), _called(1), _result(1), _user(2)),
    "call without arguments": (_user(), _odd({}), _result(1)),
    "arguments: list": (_user(), _odd(["plaqx"]), _result(1)),
    "arguments: text": (_user(), _odd('{"at": "plaqx'), _result(1)),
    "calls without user": (_system(), _called(1), _result(1)),
    "call first": (_called(1), _result(1), _user()),
    "result without call": (_user(), _result(1), _user(2)),
}

PROBES: Mapping[str, ProbeConversation] = {
    probe.name: probe
    for probe in (
        *(ProbeConversation(name=name, turns=turns) for name, turns in _CHATS.items()),
        *(
            ProbeConversation(
                name=name, turns=turns, tools=True, may_lack=(f"{ANSWER}1",) if name == _LATER_TEXT else ()
            )
            for name, turns in _CALLS.items()
        ),
        ProbeConversation(name="tools", turns=(_user(),), tools=True),
        ProbeConversation(name="system, tools", turns=(_system(), _user()), tools=True),
        *map(_effort, LEVELS),
    )
}
"""The standard conversations, by name."""
