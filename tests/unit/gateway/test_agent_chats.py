"""Recorded chats of coding agents: each request is answered, and its prompt begins with that of the one before."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest

from tests.support.gateways.agent_chats import SCRIPT, AgentChat, recorded_chats
from tests.support.gateways.agent_programs import CONTEXT, TEMPLATE
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.family_assets import FamilyAssets
from tests.support.gateways.scripted_engine import with_context
from tests.support.gateways.server import serving

HOISTING = """{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments|tojson }}</tool_call>
{%- endfor %}{% endfor %}"""
"""Moves all turns of the system to the front."""

chats = pytest.mark.parametrize("chat", recorded_chats(), ids=lambda chat: chat.name)


def test_three_programs_are_recorded() -> None:
    found = recorded_chats()
    assert [chat.name for chat in found] == ["claude", "codex", "opencode"]
    assert {len(chat.requests) for chat in found} == {sum(map(len, SCRIPT))}


@chats
async def test_every_request_is_answered(chat: AgentChat) -> None:
    async with serving(
        FakeEngine(answer=b"Done.", group=10),
        load=lambda path: FamilyAssets(TEMPLATE),
        change=lambda view: with_context(view, CONTEXT),
    ) as served:
        for body in chat.bodies():
            answer = await served.http.post(chat.path, json=body, headers=dict(chat.headers))
            assert answer.status_code == 200, answer.text
            assert "Done." in answer.text


@chats
async def test_the_prompt_of_a_request_begins_with_that_of_the_one_before(chat: AgentChat) -> None:
    prompts = [text.removesuffix("<assistant>") for text in await chat.prompts(FamilyAssets(TEMPLATE))]
    for earlier, later in pairwise(prompts):
        assert later.startswith(earlier)
    for said in chain(*SCRIPT[:-1]):
        assert said.text in prompts[-1]
        assert all(name in prompts[-1] for name, _ in said.calls(chat.name))


@chats
async def test_a_template_that_moves_the_system_to_the_front_changes_nothing_in_front(chat: AgentChat) -> None:
    for earlier, later in pairwise(await chat.prompts(FamilyAssets(HOISTING))):
        assert later.startswith(earlier)
