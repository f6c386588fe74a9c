"""Learn a template's traits from its renderings of the standard conversations. PURE.

``learn`` is a generator: it yields conversations to render, receives the outcomes, and returns the traits.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from edgepipe.text.conversations.calls import calls_of
from edgepipe.text.conversations.fitting import Tools, Wording, fit
from edgepipe.text.conversations.probes import LEVELS, PROBES, REASONING, TOOL, ProbeConversation
from edgepipe.text.conversations.roles import SYSTEM_ROLES, Turn, num_systems
from edgepipe.text.conversations.traits import CHOICES, TemplateTraits


@dataclass(frozen=True, slots=True)
class Rendering:
    """Text of a prompt, or the template's reason to refuse the conversation."""

    text: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A conversation to render."""

    turns: Sequence[Turn]
    tools: Tools = ()
    keywords: Mapping[str, Any]


Learning = Generator[Ask, Rendering, TemplateTraits]
_Trial = Generator[Ask, Rendering, bool]

PLAIN_WORDING = Wording(
    write_calls=lambda calls: json.dumps([[name, dict(arguments)] for name, arguments in calls]),
    describe_tools=lambda tools: json.dumps(list(tools)),
)
"""Texts of probes for what a template cannot write."""

_STEPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("content",), ("question", "dialogue")),
    (("system",), ("system", "system, dialogue")),
    (("tools",), ("question", "system, dialogue")),
    (("developer",), ("developer",)),
    (("systems",), ("two systems",)),
    (("users",), ("two users", "two users later")),
    (("empty_answers",), ("answer without text",)),
    (("assistants",), ("two assistants",)),
    (("late_system",), ("late system", "two systems, one late", "system after a question")),
    (("greeting",), ("greeting", "system, greeting", "greeting, dialogue")),
    (("arguments", "call_content", "ids", "results"), ("call", "call, dialogue", "call with empty text")),
    (("calls",), ("call, dialogue", "parallel calls", "parallel calls, dialogue")),
    (("results",), ("call", "call, dialogue")),
    (("call_text",), ("call with text", "call with text, dialogue")),
    (("odd_arguments",), ("arguments: list", "arguments: text")),
    (("lone_results",), ("result without call",)),
    (("after_calls",), ("user after a result", "call without result")),
    (("greeting",), ("greeting", "system, greeting", "greeting, dialogue", "call first")),
    (("no_user",), ("system alone", "calls without user")),
)
"""Fields that are chosen together, and the conversations that the choice must make complete."""

_LAST = {"calls": "text"}  # choice if no choice makes any of the conversations complete; else the first
_NONSENSE = "qxqx"
_SWITCHES = ("enable_thinking", "thinking")


def learn(*, tools: bool) -> Learning:
    """Learn the traits of a template for requests with or without tools."""
    trials = _Trials(tools)
    traits = TemplateTraits()
    for fields, names in _STEPS:
        if fields == ("tools",) and not tools:
            continue
        trials.shows_tools = trials.shows_tools or fields == ("tools",)
        traits = yield from trials.choose(traits, fields, names)
    traits = yield from _learn_roles(trials, traits)
    traits = yield from _learn_ids(trials, traits)
    traits = yield from _learn_reasoning(trials, traits)
    return (yield from _learn_efforts(trials, traits))


class _Trials:
    """Renders probes with candidates of traits."""

    def __init__(self, tools: bool) -> None:
        self._tools = tools
        self.shows_tools = False  # a complete rendering has them
        self._nones: int | None = None  # words "None" in a plain prompt

    def ask(self, name: str, traits: TemplateTraits, **keywords: Any) -> Ask:
        """Return a probe as a template with these traits takes it."""
        tools = (TOOL,) if self._tools else ()
        fitted = fit(PROBES[name].turns, tools=tools, traits=traits, wording=PLAIN_WORDING)
        return Ask(turns=fitted.turns, tools=fitted.tools, keywords=keywords)

    def choose(
        self, traits: TemplateTraits, fields: Sequence[str], names: Sequence[str]
    ) -> Generator[Ask, Rendering, TemplateTraits]:
        """Return the traits that make most probes complete, of these the ones with the fewest repairs."""
        best = replace(traits, **{name: _LAST.get(name, CHOICES[name][0]) for name in fields})
        most = 0
        for choice in sorted(product(*(enumerate(CHOICES[name]) for name in fields)), key=_num_repairs):
            candidate = replace(traits, **{name: value for name, (_, value) in zip(fields, choice, strict=True)})
            complete = yield from self.num_complete(names, candidate)
            if complete > most:
                best, most = candidate, complete
            if complete == len(names):
                break
        return best

    def num_complete(self, names: Sequence[str], traits: TemplateTraits) -> Generator[Ask, Rendering, int]:
        """Return the number of complete renderings."""
        complete = 0
        for name in names:
            complete += yield from self.is_complete(PROBES[name], traits)
        return complete

    def are_complete(self, names: Sequence[str], traits: TemplateTraits) -> _Trial:
        """Return whether all renderings are complete."""
        return (yield from self.num_complete(names, traits)) == len(names)

    def is_any_role(self, role: str, traits: TemplateTraits) -> _Trial:
        """Return whether the template writes a role as it writes any word."""
        ask = self.ask("developer" if role == "developer" else "call", traits)
        known = yield ask
        turns = [turn | {"role": _NONSENSE} if turn["role"] == role else turn for turn in ask.turns]
        unknown = yield replace(ask, turns=turns)
        return unknown.text.replace(_NONSENSE, role) == known.text != unknown.text

    def is_complete(self, probe: ProbeConversation, traits: TemplateTraits) -> _Trial:
        """Return whether the rendering shows all texts, and no value that should have been written otherwise."""
        rendering = yield self.ask(probe.name, traits)
        probe = replace(probe, tools=self.shows_tools)
        if rendering.refused or missing(probe, rendering.text) or is_miswritten(probe, rendering.text):
            return False
        if is_hoisted(probe, rendering.text):
            return False
        nones = rendering.text.count("None")
        return not nones or nones <= (yield from self._plain_nones(traits))

    def _plain_nones(self, traits: TemplateTraits) -> Generator[Ask, Rendering, int]:
        if self._nones is None:
            self._nones = (yield self.ask("question", traits)).text.count("None")
        return self._nones


def _num_repairs(choice: Sequence[tuple[int, str]]) -> int:
    return sum(place for place, _ in choice)


def missing(probe: ProbeConversation, text: str) -> list[str]:
    """Return the texts that a rendering lacks."""
    return [mark for mark in dict.fromkeys(probe.marks) if mark not in text]


def is_miswritten(probe: ProbeConversation, text: str) -> bool:
    """Return whether arguments are Python's form of an object, or JSON within JSON."""
    return not probe.odd and ("{'at'" in text or '{\\"at\\"' in text)


def is_hoisted(probe: ProbeConversation, text: str) -> bool:
    """Return whether a rendering has a later turn of the system before the turn that it follows.

    With every such turn, the prompt's beginning would change, and nothing of it would stay in the prefix cache.
    """
    count = num_systems(probe.turns)
    pairs = zip(probe.turns[max(0, count - 1) :], probe.turns[max(1, count) :], strict=False)
    return any(
        later["role"] in SYSTEM_ROLES and 0 <= text.find(later["content"]) < text.find(earlier["content"] or "")
        for earlier, later in pairs
    )


def _learn_roles(trials: _Trials, traits: TemplateTraits) -> Generator[Ask, Rendering, TemplateTraits]:
    """Find out whether the template knows the roles ``developer`` and ``tool``, or writes the name of any role.

    A model that has seen no developer gets the instructions as those of the system. Results belong into the turn of
    their calls if the template takes them there and knows no role for them.
    """
    if traits.developer == traits.system == "kept" and (yield from trials.is_any_role("developer", traits)):
        traits = replace(traits, developer="system")
    if traits.results == "kept" and traits.calls != "text" and (yield from trials.is_any_role("tool", traits)):
        candidate = replace(traits, results="in calls")
        if (yield from trials.are_complete(("call", "call, dialogue", "parallel calls, dialogue"), candidate)):
            return candidate
    return traits


def _learn_ids(trials: _Trials, traits: TemplateTraits) -> Generator[Ask, Rendering, TemplateTraits]:
    """Find out whether the template names calls itself, but results by their ids, as Kimi K2's first one does."""
    ask = trials.ask("call", traits)
    rendering = yield ask
    ids = [str(turn["tool_call_id"]) for turn in ask.turns if turn.get("tool_call_id")]
    names_calls = any(f"functions.{call['function']['name']}:" in rendering.text for call in _calls(ask.turns))
    return replace(traits, ids="named") if names_calls and any(each in rendering.text for each in ids) else traits


def _calls(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [call for turn in turns for call in calls_of(turn)]


def _learn_reasoning(trials: _Trials, traits: TemplateTraits) -> Generator[Ask, Rendering, TemplateTraits]:
    """Find the field of the reasoning before a call; templates that show no reasoning keep the first."""
    for name in CHOICES["reasoning"]:
        candidate = replace(traits, reasoning=name)
        rendering = yield trials.ask("call with reasoning", candidate)
        if REASONING in rendering.text:
            traits = candidate
            break
    return (yield from trials.choose(traits, ("call_reasoning",), ("call with reasoning, text",)))


def _learn_efforts(trials: _Trials, traits: TemplateTraits) -> Learning:
    """Find the keywords that turn reasoning on or off, and the levels of effort that change the prompt."""
    switches: list[str] = []
    for name in (*_SWITCHES, "low_effort"):
        on = yield trials.ask("question", traits, **{name: True})
        off = yield trials.ask("question", traits, **{name: False})
        if on.text != off.text:
            switches.append(name)
    reasons = dict.fromkeys(set(switches) & set(_SWITCHES), True)
    unknown = yield trials.ask("question", traits, reasoning_effort=_NONSENSE, **reasons)
    shows_any = _NONSENSE in unknown.text
    named: list[str] = []
    for level in LEVELS:
        rendering = yield trials.ask("question", traits, reasoning_effort=level, **reasons)
        if not rendering.refused and rendering.text != unknown.text:
            named.append(level)
    return replace(
        traits,
        efforts=("low", "medium", "high") if shows_any else tuple(named),
        strict_efforts=(bool(unknown.refused) and bool(named)) or shows_any,
        switches=frozenset(reasons),
        shortens="low_effort" in switches,
    )
