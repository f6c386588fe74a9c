"""Anthropic's own Python client pointed at a gateway: what it parses, and the errors that it raises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent, ToolUseBlock
from pydantic import BaseModel, TypeAdapter

from edgepipe.errors import StageLost
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.admission import AdmissionLimits
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.streams import StreamTimeouts
from tests.support.gateways.fake_engine import CONTEXT, ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving
from tests.support.gateways.template_traits import TURNS, traits_of

ANSWER = FakeEngine().answer.decode()
KEY = "ep-a-long-enough-key"
CALL = b'<tool_call>\n{"name": "look", "arguments": {"at": "the moon"}}\n</tool_call>'
LOOK: Any = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
USER: Any = [{"role": "user", "content": "hi"}]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
THINKING = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}</think>{{ tools }}"


class ThinkingAssets(ByteAssets):
    """A model that reasons."""

    traits = traits_of(THINKING + TURNS)
    chat = detect_format(THINKING)


def _client(served: Served, **more: Any) -> anthropic.AsyncAnthropic:
    options: dict[str, Any] = {"auth_token": KEY} | more
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{served.port}", max_retries=0, **options)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with _client(served) as value:
        yield value


async def create(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    """An unstreamed answer, checked by the client's types."""
    answer = await client.messages.create(**({"model": "tiny", "max_tokens": 500, "messages": USER} | fields))
    return Message.model_validate(answer.to_dict(), strict=True)


async def stream(client: anthropic.AsyncAnthropic, **fields: Any) -> tuple[Message, list[Any]]:
    """A streamed answer as the client gathers it, and its events, each checked by the client's types."""
    asked = {"model": "tiny", "max_tokens": 500, "messages": USER} | fields
    raw = await client.messages.create(stream=True, **asked)
    events = [EVENT.validate_python(event.to_dict()) async for event in raw]
    async with client.messages.stream(**asked) as gathering:
        gathered = await gathering.get_final_message()
    return gathered, events


async def test_a_message(client: anthropic.AsyncAnthropic) -> None:
    whole = await create(client)
    assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": ANSWER}]
    assert (whole.stop_reason, whole.model) == ("end_turn", "tiny")
    assert whole.usage.output_tokens == len(ANSWER) + 1
    gathered, events = await stream(client)
    assert gathered.content[0].to_dict() == {"type": "text", "text": ANSWER}
    assert [event.type for event in (events[0], *events[-3:])] == [
        "message_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert gathered.usage.input_tokens == whole.usage.input_tokens == events[0].message.usage.input_tokens
    assert gathered.usage.output_tokens == whole.usage.output_tokens


async def test_ends_of_messages(client: anthropic.AsyncAnthropic) -> None:
    assert (await create(client, max_tokens=3)).stop_reason == "max_tokens"
    stopped = await create(client, stop_sequences=["France", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "France")
    gathered, _ = await stream(client, stop_sequences=["France"])
    assert (gathered.stop_reason, gathered.stop_sequence) == ("stop_sequence", "France")
    gathered, _ = await stream(client, max_tokens=10**9)
    assert gathered.stop_reason == "end_turn"


async def test_tokens_are_counted_as_the_answer_counts_them(client: anthropic.AsyncAnthropic) -> None:
    fields: Any = {"system": [{"type": "text", "text": "Be brief."}], "tools": [LOOK], "messages": USER}
    counted = await client.messages.count_tokens(model="tiny", **fields)
    MessageTokensCount.model_validate(counted.to_dict(), strict=True)
    assert counted.input_tokens == (await create(client, **fields)).usage.input_tokens
    assert counted.input_tokens > (await client.messages.count_tokens(model="tiny", messages=USER)).input_tokens
    long: Any = [{"role": "user", "content": "x" * 300_000}]
    assert (await client.messages.count_tokens(model="tiny", messages=long)).input_tokens > 300_000


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    models = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.max_input_tokens) for model in models] == [("tiny", "model", CONTEXT)]
    assert (await client.models.retrieve("tiny")).created_at.year >= 1970


@pytest.mark.parametrize("group", [1, 7, 200])
async def test_calls_of_any_cut(group: int) -> None:
    async with serving(FakeEngine(answer=CALL + b"\n" + CALL, group=group)) as served, _client(served) as client:
        gathered, events = await stream(client, tools=[LOOK], tool_choice={"type": "any"})
        whole = await create(client, tools=[LOOK])
        for message in (gathered, whole):
            assert message.stop_reason == "tool_use"
            calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
            assert [(call.name, call.input) for call in calls] == [("look", {"at": "the moon"})] * 2
            assert len({call.id for call in calls}) == 2
        indexes = [event.index for event in events if event.type == "content_block_start"]
        assert indexes == list(range(len(indexes)))
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "dust"} for call in reversed(calls)]
        again = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        assert (await create(client, messages=again, tools=[LOOK])).content


async def test_one_call_that_is_named(client: anthropic.AsyncAnthropic, served: Served) -> None:
    await create(client, tools=[LOOK], tool_choice={"type": "tool", "name": "look"})
    assert "look" in served.engine.submits[-1].sampling.grammar
    await create(client, tools=[LOOK], tool_choice={"type": "none"})
    assert not served.engine.submits[-1].sampling.grammar
    await create(client, tools=[LOOK, {"type": "web_search_20250305", "name": "web_search"}])
    assert "web_search" not in bytes(served.engine.submits[-1].prompt).decode()


async def test_reasoning_is_in_blocks_if_it_was_asked_for() -> None:
    engine = FakeEngine(answer=b"<think>\nHm.\n</think>\n\nYes.", group=3)
    async with serving(engine, load=lambda path: ThinkingAssets()) as served, _client(served) as client:
        for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
            whole = await create(client, thinking=thinking)
            gathered, _ = await stream(client, thinking=thinking)
            for message in (whole, gathered):
                blocks = [block.to_dict() for block in message.content]
                assert [block["type"] for block in blocks] == ["thinking", "text"]
                assert (str(blocks[0]["thinking"]).strip(), str(blocks[1]["text"]).strip()) == ("Hm.", "Yes.")
                assert blocks[0]["signature"]
        for hidden in ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}):
            assert [block.type for block in (await create(client, **hidden)).content] == ["text"]
            gathered, _ = await stream(client, **hidden)
            assert [block.type for block in gathered.content] == ["text"]
        again = [*USER, {"role": "assistant", "content": whole.content}, *USER]
        assert (await create(client, messages=again, thinking={"type": "disabled"})).content


class Place(BaseModel):
    """What the model is to answer with."""

    city: str


async def test_parsed_answers() -> None:
    async with serving(FakeEngine(answer=b'{"city": "Paris"}')) as served, _client(served) as client:
        answer = await client.messages.parse(model="tiny", max_tokens=99, messages=USER, output_format=Place)
        assert answer.parsed_output == Place(city="Paris")
        assert '"city"' in served.engine.submits[0].sampling.grammar


async def test_a_prompt_that_is_too_long_has_the_text_that_clients_read(client: anthropic.AsyncAnthropic) -> None:
    for size in (CONTEXT, 200_000):
        long: Any = [{"role": "user", "content": "x" * size}]
        count = (await client.messages.count_tokens(model="tiny", messages=long)).input_tokens
        with pytest.raises(anthropic.BadRequestError) as refused:
            await create(client, messages=long)
        error: Any = refused.value.body
        assert error["error"] == {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {count} tokens > {CONTEXT - 1} maximum",
        }


async def test_errors_are_the_client_s_own_classes() -> None:
    rules = AccessRules.of(keys=(KEY,), key_on_loopback=True)
    engine = FakeEngine(hold_after=0)
    async with serving(engine, rules=rules, admission=AdmissionLimits(max_running=1, max_waiting=0)) as served:
        async with _client(served) as client, _client(served, auth_token=None, api_key=KEY) as by_key:
            assert await by_key.models.retrieve("tiny")
            for wrong in ({"auth_token": "wrong"}, {"default_headers": {"x-api-key": "other"}}):
                async with _client(served, **wrong) as stranger:
                    with pytest.raises(anthropic.AuthenticationError):
                        await create(stranger)
            async with _client(served, default_headers={"x-api-key": KEY}) as both:
                assert await both.models.retrieve("tiny")
            with pytest.raises(anthropic.NotFoundError) as missing:
                await create(client, model="other")
            body: Any = missing.value.body
            assert body["error"]["type"] == "not_found_error"
            with pytest.raises(anthropic.RequestTooLargeError):
                await create(client, messages=[{"role": "user", "content": "x" * (9 << 20)}])
            held = await client.messages.create(model="tiny", max_tokens=99, messages=USER, stream=True)
            with pytest.raises(anthropic.RateLimitError) as full:
                await create(client)
            assert full.value.response.headers["retry-after"] == "1"
            engine.release.set()
            texts = [event.delta.text async for event in held if event.type == "content_block_delta"]  # type: ignore[union-attr]
            assert "".join(texts) == ANSWER


async def test_an_error_within_an_answer_is_an_event() -> None:
    engine = FakeEngine(hold_after=5, error=StageLost("stage 1 ended"))
    async with serving(engine) as served, _client(served) as client:
        with pytest.raises(anthropic.APIStatusError) as broken:
            await stream(client)
        error: Any = broken.value.body
        assert error["error"]["type"] == "api_error"
        assert "stage 1 ended" in json.dumps(error)


async def test_a_long_pause_has_pings() -> None:
    """No block begins or ends for a ping."""
    engine = FakeEngine(hold_after=5)
    timeouts = StreamTimeouts(hold_s=0.01, recovering_s=0.02, pause_s=0.02)
    async with serving(engine, timeouts=timeouts) as served, _client(served) as client:
        asked = await client.messages.create(model="tiny", max_tokens=99, messages=USER, stream=True)
        kinds: list[str] = []
        async for line in asked.response.aiter_lines():
            kinds += [line.removeprefix("event: ")] if line.startswith("event: ") else []
            if kinds[-3:] == ["ping"] * 3:
                engine.release.set()
        assert kinds[:2] == ["message_start", "ping"], "the opening"
        within = kinds.index("content_block_delta") + 1
        assert kinds[within:].count("ping") >= 3
        assert [kind for kind in kinds[2:] if kind not in ("ping", "content_block_delta")] == [
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]


async def test_a_client_that_leaves_within_an_answer_ends_the_request() -> None:
    engine = FakeEngine(hold_after=5)
    async with serving(engine) as served, _client(served) as client:
        asked = await client.messages.create(model="tiny", max_tokens=99, messages=USER, stream=True)
        async for event in asked:
            if event.type == "content_block_delta":
                break
        await asked.close()
        async with asyncio.timeout(10):
            await engine.cancelled.wait()
