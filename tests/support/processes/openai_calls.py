"""What people do with OpenAI's library, of version 2 or 3, against a cluster whose address is the only argument.

The test that runs this file puts the version first on Python's path. It prints the version.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0}
QUESTION = [{"role": "user", "content": "Where is the moon?"}]
MANY = 400  # tokens: more than any JSON of these schemas has


class Place(BaseModel):
    """Look up a place."""

    city: Literal["Lima", "Oslo"]


def chats(client: OpenAI) -> None:
    """Chat completions: create, both kinds of streams, parse, a tool and its result."""
    create: Any = client.chat.completions.create
    whole = create(messages=QUESTION, max_tokens=12, **ASKED)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (12, "length")
    chunks = list(create(messages=QUESTION, max_tokens=12, stream=True, **ASKED))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    stream: Any = client.chat.completions.stream
    with stream(messages=QUESTION, max_tokens=12, **ASKED) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        gathered = events.current_completion_snapshot.choices[0].message.content
    assert "".join(deltas) == gathered == "".join(texts)

    parse: Any = client.chat.completions.parse
    parsed = parse(messages=QUESTION, response_format=Place, max_tokens=MANY, **ASKED)
    assert isinstance(parsed.choices[0].message.parsed, Place)

    tools: list[Any] = [openai.pydantic_function_tool(Place)]
    called = parse(messages=QUESTION, tools=tools, tool_choice="required", max_tokens=MANY, **ASKED)
    calls = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert all(isinstance(call.function.parsed_arguments, Place) for call in calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "here"} for call in calls]
    answer = called.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    after = create(messages=[*QUESTION, answer, *results], tools=tools, tool_choice="required", max_tokens=4, **ASKED)
    assert after.usage.prompt_tokens > called.usage.prompt_tokens


def responses(client: OpenAI) -> None:
    """Responses: create, stream, parse, reasoning, a tool whose result continues the stored response."""
    create: Any = client.responses.create
    whole = create(input="Where is the moon?", max_output_tokens=12, **ASKED)
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 12)
    stream: Any = client.responses.stream
    with stream(input="Where is the moon?", max_output_tokens=12, **ASKED) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text

    parse: Any = client.responses.parse
    parsed = parse(input="Where?", text_format=Place, max_output_tokens=MANY, **ASKED)
    assert isinstance(parsed.output_parsed, Place)

    thinker = {**ASKED, "model": "thinker", "reasoning": {"effort": "high"}}
    thought = create(input="Where?", max_output_tokens=20, **thinker)
    assert thought.output[0].type == "reasoning"
    assert thought.usage.output_tokens_details.reasoning_tokens == thought.usage.output_tokens > 0

    tool = {"type": "function", "name": "look", "parameters": Place.model_json_schema(), "strict": True}
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": "required", **ASKED}
    called = create(input="Where?", max_output_tokens=MANY, **asked)
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    assert all(Place.model_validate_json(call.arguments) for call in calls)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "here"} for call in calls]
    after = create(input=results, previous_response_id=called.id, max_output_tokens=4, **asked)
    assert after.usage.input_tokens > called.usage.input_tokens
    assert after.usage.input_tokens_details.cached_tokens > 0, "its prompt begins with that of the response before"

    kept = client.responses.retrieve(after.id)
    assert (kept.id, kept.previous_response_id) == (after.id, called.id)
    items = client.responses.input_items.list(after.id, order="asc", limit=50).data
    kinds = ["function_call_output"] * len(calls)
    assert [item.type for item in items] == ["message", *(call.type for call in calls), *kinds]
    client.responses.delete(after.id)
    with pytest.raises(openai.BadRequestError) as refused:
        create(input="More.", previous_response_id=after.id, **ASKED)
    assert refused.value.code == "previous_response_not_found"


def main() -> None:
    """Make all calls."""
    with OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert {model.id for model in client.models.list()} == {"tiny", "thinker"}
        chats(client)
        responses(client)
    sys.stdout.write(openai.__version__)


if __name__ == "__main__":
    main()
