"""OpenAI's own Python client pointed at a gateway: what it parses, and the errors that it raises."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from pydantic import BaseModel

from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.admission import AdmissionLimits
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

ANSWER = FakeEngine().answer.decode()
KEY = "ep-a-long-enough-key"
CALL = b'<tool_call>\n{"name": "look", "arguments": {"at": "the moon"}}\n</tool_call>'


def _client(served: Served, *, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=key, max_retries=0)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with _client(served) as value:
        yield value


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, logprobs=True, top_logprobs=1, seed=1
    )
    ChatCompletion.model_validate(answer.model_dump())  # the client itself does not check
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * (len(ANSWER) + 1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == ANSWER


async def test_a_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=100,
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER) + 1


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="x", logprobs=1, max_tokens=2)
    Completion.model_validate(answer.model_dump())
    answer = await client.completions.create(model="tiny", prompt=[[97], [98, 99]], echo=True, logprobs=1, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["aTh", "bcTh"]
    stream = await client.completions.create(model="tiny", prompt="x", stream=True, max_tokens=4)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == ANSWER[:4]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "edgepipe"


async def test_tools_over_two_turns() -> None:
    tool = {"type": "function", "function": {"name": "look", "strict": True, "parameters": {"type": "object"}}}
    async with serving(FakeEngine(answer=CALL, group=4)) as served, _client(served) as client:
        stream = client.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": "look"}],
            tools=[tool],  # pyright: ignore[reportArgumentType]
        )
        async with stream as events:
            message = (await events.get_final_completion()).choices[0].message
        (call,) = message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"at": "the moon"}
        again = await client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "user", "content": "look"},
                message.to_dict(),  # pyright: ignore[reportArgumentType]
                {"role": "tool", "tool_call_id": call.id, "content": "dust"},
            ],
        )
        assert again.choices[0].message.content


@pytest.mark.parametrize("group", [1, 7, 200])
async def test_streamed_calls_of_any_cut(group: int) -> None:
    """The client takes one entry of each call in a delta, and refuses what breaks that."""
    async with serving(FakeEngine(answer=CALL + b"\n" + CALL, group=group)) as served, _client(served) as client:
        stream = client.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": "look"}],
            tools=[{"type": "function", "function": {"name": "look", "strict": True}}],
            tool_choice="required",
        )
        async with stream as events:
            async for event in events:
                pieces = event.chunk.choices[0].delta.tool_calls or () if event.type == "chunk" else ()
                assert len({piece.index for piece in pieces}) == len(pieces)
            choice = (await events.get_final_completion()).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()] == [
            {"at": "the moon"},
            {"at": "the moon"},
        ]


class Place(BaseModel):
    """What the model is to answer with."""

    city: str


async def test_parsed_answers() -> None:
    async with serving(FakeEngine(answer=b'{"city": "Paris"}')) as served, _client(served) as client:
        answer = await client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "where?"}], response_format=Place
        )
        assert answer.choices[0].message.parsed == Place(city="Paris")
        assert '"city"' in served.engine.submits[0].sampling.grammar


@pytest.mark.parametrize(
    ("answer", "parsed", "called"),
    [
        (b'{"city": "Paris"}', Place(city="Paris"), []),
        (b'<tool_call>\n{"name": "Place", "arguments": {"city": "Rome"}}\n</tool_call>', None, [Place(city="Rome")]),
    ],
)
async def test_an_agent_s_tools_and_the_form_of_its_last_answer(
    answer: bytes, parsed: Place | None, called: list[Place]
) -> None:
    """OpenAI's agents send both with every request."""
    async with serving(FakeEngine(answer=answer, group=5)) as served, _client(served) as client:
        whole = await client.chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": "where?"}],
            response_format=Place,
            tools=[openai.pydantic_function_tool(Place)],
        )
        message = whole.choices[0].message
        assert message.parsed == parsed
        assert [call.function.parsed_arguments for call in message.tool_calls or ()] == called


async def test_errors_are_the_client_s_own_classes() -> None:
    rules = AccessRules.of(keys=(KEY,), key_on_loopback=True)
    engine = FakeEngine(hold_after=0)
    async with serving(engine, rules=rules, admission=AdmissionLimits(max_running=1, max_waiting=0)) as served:
        async with _client(served) as client, _client(served, key="wrong-key") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
            with pytest.raises(openai.NotFoundError) as missing:
                await client.models.retrieve("other")
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model="tiny", prompt="x", temperature=9)
            assert bad.value.param == "temperature"
            held = await client.completions.create(model="tiny", prompt="x", stream=True)
            with pytest.raises(openai.RateLimitError) as full:
                await client.completions.create(model="tiny", prompt="x")
            assert full.value.response.headers["retry-after"] == "1"
            engine.release.set()
            assert "".join([choice.text async for chunk in held for choice in chunk.choices]) == ANSWER[:16]
