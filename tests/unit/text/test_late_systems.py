"""Turns of the system behind other turns: none of them changes the prompt before it, and no text is lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.text.conversations.calls import results_in_order
from edgepipe.text.conversations.fitting import Wording, fit
from edgepipe.text.conversations.roles import Turn, late_systems_tagged, systems_after_results
from edgepipe.text.conversations.traits import TemplateTraits
from tests.support.gateways.template_traits import traits_of

HOISTING = """{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
IN_PLACE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WORDING = Wording(write_calls=lambda calls: "", describe_tools=lambda tools: "")
KEPT = TemplateTraits(developer="system")
TAGGED = TemplateTraits(developer="system", systems="joined", late_system="tagged")


def said(role: str, content: str | None, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def called(*names: str) -> Turn:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return said("assistant", None, tool_calls=calls)


def result(name: str) -> Turn:
    return said("tool", f"of {name}", tool_call_id=name)


def shown(turns: Sequence[Turn]) -> list[str]:
    return [f"{turn['role']}:{turn['content']}" for turn in turns]


SYSTEM, USER, ANSWER = said("system", "s"), said("user", "u"), said("assistant", "a")
TAG = "<system>\ns\n</system>"


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([SYSTEM, USER], ["system:s", "user:u"]),
        ([USER, SYSTEM], [f"user:u\n\n{TAG}"]),
        ([USER, SYSTEM, SYSTEM, USER], [f"user:u\n\n{TAG}\n\n{TAG}", "user:u"]),
        ([USER, ANSWER, SYSTEM, USER], ["user:u", "assistant:a", f"user:{TAG}\n\nu"]),
        ([USER, ANSWER, SYSTEM, ANSWER], ["user:u", "assistant:a", f"user:{TAG}", "assistant:a"]),
        ([USER, ANSWER, SYSTEM], ["user:u", "assistant:a", f"user:{TAG}"]),
        ([USER, said("system", "")], ["user:u"]),
        ([USER, ANSWER, said("system", ""), USER], ["user:u", "assistant:a", "user:u"]),
        ([USER, called("x"), result("x"), SYSTEM], ["user:u", "assistant:None", f"tool:of x\n\n{TAG}"]),
    ],
)
def test_a_later_turn_of_the_system_becomes_a_part_of_the_turn_beside_it(
    turns: list[Turn], expected: list[str]
) -> None:
    assert shown(late_systems_tagged(turns)) == expected


def test_no_turn_of_the_system_is_between_calls_and_results() -> None:
    turns = [USER, called("x", "y"), SYSTEM, result("y"), said("developer", "d"), result("x"), USER]
    kept = shown(fit(turns, tools=(), traits=KEPT, wording=WORDING).turns)
    assert kept == ["user:u", "assistant:None", "tool:of x", "tool:of y", "system:s", "system:d", "user:u"]
    tagged = shown(fit(turns, tools=(), traits=TAGGED, wording=WORDING).turns)
    assert tagged[2:] == ["tool:of x", f"tool:of y\n\n{TAG}\n\n<system>\nd\n</system>", "user:u"]


def test_a_template_that_moves_the_system_s_turns_to_the_front_gets_them_as_text() -> None:
    assert traits_of(HOISTING).plain.late_system == "tagged"
    assert traits_of(IN_PLACE).plain.late_system == "kept"


TEXTS = st.text("abc", min_size=1, max_size=3)
INPUTS = st.lists(st.builds(said, st.sampled_from(["system", "developer", "user"]), TEXTS), min_size=1, max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> list[list[Turn]]:
    """The conversation of each request of a chat: every one begins with all turns of the one before."""
    turns = [said("system", "head")] * draw(st.integers(0, 1)) + [said("user", "first"), *draw(INPUTS)]
    requests = [list(turns)]
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from("xyz"), unique=True, max_size=3))
        results = draw(st.permutations([result(name) for name in names]))
        systems = draw(st.lists(st.builds(said, st.just("system"), TEXTS), max_size=2)) if names else []
        turns += [called(*names) if names else ANSWER, *draw(st.permutations([*results, *systems]))]
        turns += draw(INPUTS) if not names else []
        requests.append(list(turns))
    return requests


@pytest.mark.parametrize("traits", [KEPT, TAGGED])
@given(requests=histories())
def test_the_prompt_of_a_request_begins_with_that_of_the_request_before(
    traits: TemplateTraits, requests: list[list[Turn]]
) -> None:
    prompts = ["".join(shown(fit(turns, tools=(), traits=traits, wording=WORDING).turns)) for turns in requests]
    for earlier, later in pairwise(prompts):
        assert later.startswith(earlier)
    assert all(str(turn["content"]) in prompts[-1] for turn in requests[-1])


@given(requests=histories())
def test_results_have_the_order_of_their_calls_and_follow_them(requests: list[list[Turn]]) -> None:
    turns = results_in_order(systems_after_results(requests[-1]))
    for place, turn in enumerate(turns):
        ids = [call["id"] for call in turn.get("tool_calls", ())]
        assert [behind.get("tool_call_id") for behind in turns[place + 1 : place + 1 + len(ids)]] == ids
