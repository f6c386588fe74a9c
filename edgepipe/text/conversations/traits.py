"""What a chat template accepts, learned from its renderings. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

TRAITS_VERSION = 2
"""Stored traits of another version are learned again. Raise it with every change of probes, choices or learning."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "content": ("text", "parts"),
    "system": ("kept", "user"),
    "developer": ("kept", "system"),
    "systems": ("kept", "joined"),
    "late_system": ("kept", "tagged"),
    "users": ("kept", "joined"),
    "assistants": ("kept", "joined"),
    "empty_answers": ("kept", "dropped"),
    "greeting": ("kept", "after user"),
    "no_user": ("kept", "empty user", "dot"),
    "tools": ("keyword", "system field", "text"),
    "calls": ("kept", "one each", "text"),
    "call_content": ("kept", "null", "empty"),
    "call_text": ("kept", "own turn", "text"),
    "arguments": ("object", "text"),
    "odd_arguments": ("kept", "wrapped"),
    "ids": ("kept", "short", "named"),
    "results": ("kept", "in calls", "user"),
    "lone_results": ("kept", "user"),
    "after_calls": ("kept", "empty answer", "dot"),
    "reasoning": ("reasoning_content", "thinking", "reasoning"),
    "call_reasoning": ("kept", "joined"),
}
"""Ways to write each situation, in order of preference. The first one leaves the conversation as the client sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """How each situation is written for one template; ``CHOICES`` lists the values."""

    content: str = "text"  # a turn's content: a text, or a list of one text part
    system: str = "kept"  # the system's turn: kept, or put into the first user's turn
    developer: str = "kept"  # the developer's turn: kept, or given the role ``system``
    systems: str = "kept"  # several system turns at the beginning: kept, or joined
    late_system: str = "kept"  # a system turn after other turns: kept, or text in tags within the turn beside it
    users: str = "kept"  # several turns of the user in a row: kept, or joined
    assistants: str = "kept"  # several turns of the assistant in a row: kept, or joined
    empty_answers: str = "kept"  # turns of the assistant with neither text nor calls: kept, or dropped
    greeting: str = "kept"  # an assistant's turn at the beginning: kept, or put after an empty turn of the user
    no_user: str = "kept"  # no turn of the user: kept, or with an added turn that is empty or a dot
    # Tools: the keyword ``tools``, JSON text in the system's field, or text of the system's turn.
    tools: str = "keyword"
    calls: str = "kept"  # calls: fields, one per turn with its result behind it, or part of the turn's text
    call_content: str = "kept"  # missing content of a turn with calls: as sent, null, or an empty text
    call_text: str = "kept"  # text beside calls: content, a turn before the calls, or both as text
    arguments: str = "object"  # a call's arguments: an object, or JSON text
    odd_arguments: str = "kept"  # arguments that are no object: kept, or wrapped in one
    ids: str = "kept"  # ids of calls: kept, nine letters and digits, or ``functions.NAME:NUMBER``
    results: str = "kept"  # results: turns of the role ``tool``, in the turn of their calls, or turns of the user
    lone_results: str = "kept"  # results that follow no call: kept, or turns of the user
    # A user's turn right after calls or results: kept, or after an added answer that is empty or a dot.
    after_calls: str = "kept"
    reasoning: str = "reasoning_content"  # name of the field that holds reasoning
    call_reasoning: str = "kept"  # reasoning and text beside calls: kept, or both as reasoning
    efforts: tuple[str, ...] = ()  # levels that change the rendering, from least to most
    strict_efforts: bool = False  # refuses other levels, or shows the model any word
    switches: frozenset[str] = field(default_factory=frozenset[str])  # keywords that turn reasoning on or off
    shortens: bool = False  # the keyword ``low_effort`` shortens reasoning

    @property
    def one_call(self) -> bool:
        """Whether a turn of the assistant has at most one call."""
        return self.calls == "one each"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value; ``from_json`` restores equal traits."""
        return asdict(self) | {"efforts": list(self.efforts), "switches": sorted(self.switches)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TemplateTraits:
        """Read a JSON value. Raises ValueError for anything that ``to_json`` does not write."""
        if set(value) != {one.name for one in fields(cls)}:
            raise ValueError("other fields")
        for name, choices in CHOICES.items():
            if value[name] not in choices:
                raise ValueError(name)
        return cls(
            **{name: value[name] for name in CHOICES},
            efforts=tuple(_words(value["efforts"])),
            switches=frozenset(_words(value["switches"])),
            strict_efforts=bool(value["strict_efforts"]),
            shortens=bool(value["shortens"]),
        )


def _words(value: object) -> list[str]:
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(isinstance(item, str) for item in items):
        raise ValueError("words are needed")
    return cast("list[str]", items)


CAREFUL = TemplateTraits(
    system="user",
    developer="system",
    systems="joined",
    late_system="tagged",
    users="joined",
    assistants="joined",
    greeting="after user",
    no_user="empty user",
    tools="text",
    calls="text",
    results="user",
)
"""Only text, in turns of user and assistant that alternate: every chat template takes that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Traits of a model's templates."""

    plain: TemplateTraits = field(default_factory=TemplateTraits)  # traits for requests without tools
    with_tools: TemplateTraits = field(default_factory=TemplateTraits)
    note: str = ""  # why traits could not be learned, for people

    def choose(self, *, tools: bool) -> TemplateTraits:
        """Return the traits for a request with or without tools."""
        return self.with_tools if tools else self.plain

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value; ``from_json`` restores equal traits."""
        return {"plain": self.plain.to_json(), "with_tools": self.with_tools.to_json(), "note": self.note}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelTraits:
        """Read a JSON value. Raises ValueError for anything that ``to_json`` does not write."""
        plain, with_tools, note = (value.get(name) for name in ("plain", "with_tools", "note"))
        if not isinstance(plain, dict) or not isinstance(with_tools, dict) or not isinstance(note, str):
            raise ValueError("other fields")
        return cls(
            plain=TemplateTraits.from_json(cast("dict[str, Any]", plain)),
            with_tools=TemplateTraits.from_json(cast("dict[str, Any]", with_tools)),
            note=note,
        )
