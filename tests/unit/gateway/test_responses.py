"""The Responses API, asked by OpenAI's own client. The client's types check every event and every body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import BaseModel, TypeAdapter

from edgepipe.errors import StageLost
from edgepipe.gateway.admission import AdmissionLimits
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.streams import StreamTimeouts
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving

ANSWER = FakeEngine().answer.decode()
THOUGHT = b"Hm, France.</think>\n\nParis."
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
SPACE = {"type": "namespace", "name": "files", "description": "", "tools": [LOOK, PATCH]}


class ThinkingAssets(ByteAssets):
    """A model that reasons; its template opens the reasoning."""

    chat = detect_format("<think></think>")

    async def render(self, messages: Any, *, owner: str = "", **keywords: Any) -> str:
        return await super().render(messages, owner=owner, **keywords) + "<think>\n"


def call(name: str, **arguments: Any) -> bytes:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>".encode()


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="any", max_retries=0)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(served) as value:
        yield value


async def streamed(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response, after the client's types have checked each of them."""
    answer = await served.http.post("/v1/responses", json={"input": "hi", "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


def events_in(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in filter(None, text.split("\n\n")):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS.validate_python(events[-1])
        if "response" in events[-1]:
            Response.model_validate(events[-1]["response"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return the types without ``response.``; deltas that follow one another count once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if not (at and name == names[at - 1])]


async def test_a_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="hi", instructions="Be brief.", metadata={"a": "b"})
    Response.model_validate(answer.model_dump())
    assert (answer.output_text, answer.status, answer.metadata) == (ANSWER, "completed", {"a": "b"})
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ANSWER) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_the_events_of_a_text(served: Served) -> None:
    events = await streamed(served)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == ANSWER
    assert events[-1]["response"]["output"][0] == events[-2]["item"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ANSWER


async def test_the_client_streams_and_parses(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input="hi") as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == ANSWER


async def test_a_form_of_the_answer() -> None:
    class Place(BaseModel):
        city: str

    async with serving(FakeEngine(answer=b'{"city": "Paris"}')) as served, client_of(served) as client:
        answer = await client.responses.parse(model="tiny", input="hi", text_format=Place)
        assert answer.output_parsed == Place(city="Paris")
        assert "city" in served.engine.submits[-1].sampling.grammar


@pytest.mark.parametrize("group", [1, 3, 100])
async def test_reasoning_and_its_tokens(group: int) -> None:
    """Tokens of the byte alphabet have a byte each; the closing mark and the spaces after it count."""
    load = lambda path: ThinkingAssets()  # noqa: E731
    async with serving(FakeEngine(answer=THOUGHT, group=group), load=load) as served:
        events = await streamed(served)
        assert kinds(events)[2:9] == [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
        ]
        reasoning, message = events[-1]["response"]["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, France."}]
        assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], None)
        assert message["content"][0]["text"] == "Paris."
        expected = len(b"Hm, France.</think>\n\n")
        assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}
        chat = (await served.chat()).json()
        assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}


async def test_reasoning_goes_back_to_the_model() -> None:
    load = lambda path: ThinkingAssets()  # noqa: E731
    async with serving(FakeEngine(answer=THOUGHT, group=50), load=load) as served, client_of(served) as client:
        first = await client.responses.create(model="tiny", input="hi", store=False)
        items: list[Any] = [item.to_dict() for item in first.output]
        await client.responses.create(model="tiny", input=[*items, {"role": "user", "content": "more"}], store=False)
        assert b"Paris." in bytes(served.engine.submits[-1].prompt)


async def test_calls_of_a_namespace_and_of_a_custom_tool() -> None:
    said = call("files__look", at="moon") + b"\n" + call("files__patch", input='*** "x"\né')
    async with serving(FakeEngine(answer=said, group=7)) as served:
        events = await streamed(served, tools=[SPACE, {"type": "web_search"}], tool_choice="auto")
        looked, patched = events[-1]["response"]["output"]
        assert (looked["type"], looked["name"], looked["namespace"]) == ("function_call", "look", "files")
        assert json.loads(looked["arguments"]) == {"at": "moon"}
        assert (patched["type"], patched["name"], patched["input"]) == ("custom_tool_call", "patch", '*** "x"\né')
        assert kinds(events)[2:10] == [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ]
        results = [
            {"type": "function_call_output", "call_id": looked["call_id"], "output": "dust"},
            {
                "type": "custom_tool_call_output",
                "call_id": patched["call_id"],
                "output": [{"type": "input_text", "text": "ok "}, {"type": "input_image", "image_url": "x"}],
            },
        ]
        again = await streamed(served, input=[{"role": "user", "content": "hi"}, looked, patched, *results])
        assert again[-1]["type"] == "response.completed"
        prompt = bytes(served.engine.submits[-1].prompt).decode()
        assert "files__patch" in prompt
        assert "dust" in prompt
        assert "ok [An image was here. This model reads text only.]" in prompt


async def test_a_choice_of_tools() -> None:
    async with serving(FakeEngine(answer=call("look"), group=50)) as served:
        chosen = {"type": "function", "name": "look"}
        assert (await streamed(served, tools=[LOOK], tool_choice=chosen))[-1]["response"]["output"][0]["name"] == "look"
        some = {"type": "allowed_tools", "mode": "auto", "tools": [chosen, {"type": "web_search"}]}
        assert (await streamed(served, tools=[LOOK, PATCH], tool_choice=some))[-1]["type"] == "response.completed"
        grammar = served.engine.submits[-1].sampling.grammar
        assert "look" in grammar
        assert "patch" not in grammar
        for left_out in ({"type": "web_search"}, {"type": "allowed_tools", "tools": [{"type": "mcp"}]}):
            body = {"input": "hi", "tools": [LOOK, {"type": "web_search"}], "tool_choice": left_out}
            answer = await served.http.post("/v1/responses", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


async def test_an_answer_that_is_cut(served: Served) -> None:
    events = await streamed(served, max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


async def test_a_full_context(served: Served) -> None:
    answer = await served.http.post("/v1/responses", json={"input": "x" * 5000})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


async def test_an_engine_that_is_lost_within_an_answer() -> None:
    async with serving(FakeEngine(error=StageLost("stage 1 ended"), hold_after=5)) as served:
        events = await streamed(served)
        assert events[-1]["type"] == "response.failed"
        assert "stage 1 ended" in events[-1]["response"]["error"]["message"]
        assert "completed" not in kinds(events)


async def test_no_stream_waits_for_more_after_an_error_that_came_with_its_last_tokens() -> None:
    """Tokens and the error may both be there before the reader looks, as in the first request of a gateway."""
    for _ in range(8):
        async with serving(FakeEngine(error=StageLost("stage 1 ended"), hold_after=5)) as served, asyncio.timeout(20):
            assert (await streamed(served))[-1]["type"] == "response.failed"


async def test_a_long_pause_has_events() -> None:
    engine = FakeEngine(hold_after=0)
    timeouts = StreamTimeouts(hold_s=0.01, recovering_s=0.02, pause_s=0.02)
    async with serving(engine, timeouts=timeouts) as served:
        asking = asyncio.create_task(streamed(served))
        await engine.submitted.wait()
        await asyncio.sleep(0.3)
        engine.release.set()
        events = await asking
        assert sum(event["type"] == "response.in_progress" for event in events) >= 3
        assert events[-1]["type"] == "response.completed"


async def test_a_client_that_leaves_ends_the_request() -> None:
    engine = FakeEngine(hold_after=5)
    async with serving(engine, admission=AdmissionLimits()) as served:
        async with served.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if "output_text.delta" in line:
                    break
        async with asyncio.timeout(10):
            await engine.cancelled.wait()


async def test_a_response_continues_an_earlier_one(client: openai.AsyncOpenAI, served: Served) -> None:
    first = await client.responses.create(model="tiny", input="hi")
    second = await client.responses.create(model="tiny", input="more", previous_response_id=first.id)
    prompt = bytes(served.engine.submits[-1].prompt).decode()
    assert prompt == f"user: hi\nassistant: {ANSWER}\nuser: more\nassistant:"
    assert (await client.responses.retrieve(second.id)).output_text == ANSWER
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message"] * 3
    listed = (await served.http.get(f"/v1/responses/{second.id}/input_items")).json()
    ResponseItemList.model_validate(listed)
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="more", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    assert "restarts" in caught.value.message
    unstored = await client.responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)


async def test_an_empty_input_is_an_empty_turn(served: Served) -> None:
    answer = await served.http.post("/v1/responses", json={"input": "", "max_output_tokens": 1})
    assert answer.status_code == 200
    assert bytes(served.engine.submits[-1].prompt).decode() == "user: \nassistant:"


async def test_embeddings_are_refused(served: Served) -> None:
    answer = await served.http.post("/v1/embeddings", json={"input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
