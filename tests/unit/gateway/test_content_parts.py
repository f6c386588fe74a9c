"""Parts of a message's content, and the forms in which clients send an answer back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving


@pytest.mark.parametrize(
    ("turn", "content", "reasoning"),
    [
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}]}, "a", None),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot.", None),
        ({"content": None, "refusal": "I cannot."}, "I cannot.", None),
        ({"content": "a", "refusal": None}, "a", None),
        (
            {"content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "a"}]},
            "a",
            "Hm.",
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                    {"type": "text", "text": "a"},
                ]
            },
            "a",
            "Hm.",
        ),
        ({"content": [{"type": "reasoning", "text": "Hm."}, {"type": "redacted_thinking", "data": "x"}]}, "", "Hm."),
        ({"content": "a", "reasoning": "Hm."}, "a", "Hm."),
        ({"content": "a", "thinking": "Hm."}, "a", "Hm."),
        ({"content": "a", "reasoning_content": "Hm.", "reasoning": "Hm."}, "a", "Hm."),
        ({"content": [{"type": "thinking", "thinking": "no"}], "reasoning_content": "Hm."}, "", "Hm."),
    ],
)
async def test_an_earlier_answer_may_come_back_in_any_form(
    turn: dict[str, Any], content: str, reasoning: str | None
) -> None:
    class Assets(ByteAssets):
        async def render(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
            return json.dumps(messages)

    async with serving(FakeEngine(), load=lambda path: Assets()) as served:
        messages = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, {"role": "assistant", **turn}]
        response = await served.http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 200, response.text
        user, answer = json.loads(bytes(served.engine.submits[0].prompt))
    assert user["content"] == "hi"
    assert (answer["content"], answer.get("reasoning_content")) == (content, reasoning)
    assert set(answer) <= {"role", "content", "reasoning_content"}


async def test_a_part_that_is_no_text_is_refused_by_its_type(served: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    response = await served.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.content"
    assert "not 'image_url'" in response.json()["error"]["message"]
