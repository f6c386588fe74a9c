"""Compare what a template makes of the standard conversations as sent, as repaired, and by transformers. PURE."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgepipe.text.conversations.efforts import keywords_of
from edgepipe.text.conversations.fitting import Wording, fit
from edgepipe.text.conversations.learning import Ask, Rendering, is_hoisted, is_miswritten, missing
from edgepipe.text.conversations.probes import PROBES, TOOL, ProbeConversation
from edgepipe.text.conversations.traits import CHOICES, ModelTraits, TemplateTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedConversation:
    """What becomes of one conversation."""

    conversation: str
    outcome: str  # "as sent" | "repaired" | "incomplete" | "refused"
    repairs: tuple[str, ...] = ()  # such as ``users: joined``
    left_out: tuple[str, ...] = ()  # texts that the prompt lacks
    as_sent: str = ""  # why the template refuses the conversation as it was sent, or what it left out
    reason: str = ""  # why the template refuses it nevertheless
    transformers: str = ""  # equal, differs, refused; empty: not compared

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {
            "conversation": self.conversation,
            "outcome": self.outcome,
            "repairs": list(self.repairs),
            "left_out": list(self.left_out),
            "as_sent": self.as_sent,
            "reason": self.reason,
            "transformers": self.transformers or None,
        }


Checking = Generator[tuple[Ask, bool], Rendering, list[CheckedConversation]]
"""Yields conversations to render, each with whether transformers renders it, and returns the verdicts."""


def check(traits: ModelTraits, wording: Wording, *, reference: bool) -> Checking:
    """Check all standard conversations. ``reference``: compare with transformers."""
    verdicts: list[CheckedConversation] = []
    for probe in PROBES.values():
        verdict = yield from _check(probe, traits.choose(tools=probe.tools), wording, reference)
        verdicts.append(verdict)
    return verdicts


def _check(
    probe: ProbeConversation, traits: TemplateTraits, wording: Wording, reference: bool
) -> Generator[tuple[Ask, bool], Rendering, CheckedConversation]:
    tools = (TOOL,) if probe.tools else ()
    as_sent = Ask(turns=probe.turns, tools=tools, keywords=probe.keywords)
    sent = yield as_sent, False
    fitted = fit(probe.turns, tools=tools, traits=traits, wording=wording)
    keywords = keywords_of(probe.keywords, None, traits)
    made = yield Ask(turns=fitted.turns, tools=fitted.tools, keywords=keywords), False
    verdict = _verdict(probe, sent, made)
    if verdict.outcome != "as sent":
        repairs = (*_repairs(probe, traits, wording), *_changed(probe.keywords, keywords))
        verdict = replace(verdict, repairs=repairs or ("empty fields: left out",))
    if reference:
        other = yield as_sent, True
        same = "equal" if other.text == made.text else "differs"
        verdict = replace(verdict, transformers="refused" if other.refused else same)
    return verdict


def _verdict(probe: ProbeConversation, sent: Rendering, made: Rendering) -> CheckedConversation:
    name = probe.name
    fault = sent.refused or _fault(probe, sent.text, made.text)
    if made.refused:
        return CheckedConversation(conversation=name, outcome="refused", as_sent=fault, reason=made.refused)
    left_out = tuple(missing(probe, made.text))
    same = not sent.refused and sent.text == made.text
    outcome = "incomplete" if left_out else "as sent" if same else "repaired"
    return CheckedConversation(conversation=name, outcome=outcome, left_out=left_out, as_sent=fault)


def _fault(probe: ProbeConversation, text: str, repaired: str) -> str:
    if left_out := missing(probe, text):
        return f"left out {', '.join(left_out)}"
    if text.count("None") > repaired.count("None"):
        return "wrote None for a missing text"
    if is_hoisted(probe, text):
        return "moved a later system turn to the front"
    return "arguments are miswritten" if is_miswritten(probe, text) else ""


def _repairs(probe: ProbeConversation, traits: TemplateTraits, wording: Wording) -> tuple[str, ...]:
    """Return the traits that change this conversation."""
    tools = (TOOL,) if probe.tools else ()
    whole = fit(probe.turns, tools=tools, traits=traits, wording=wording)
    found: list[str] = []
    for name, choices in CHOICES.items():
        value = getattr(traits, name)
        if value != choices[0]:
            without = replace(traits, **{name: choices[0]})
            if fit(probe.turns, tools=tools, traits=without, wording=wording) != whole:
                found.append(f"{name}: {value}")
    return tuple(found)


def _changed(given: Mapping[str, Any], keywords: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}: {value}" for name, value in keywords.items() if given.get(name) != value)
