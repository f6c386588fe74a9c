"""Every field of a request reaches the engine or the answer, in the shapes that clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import Served, events_of, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = FakeEngine().answer.decode()
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
CALL = b'<tool_call>\n{"name": "look", "arguments": {"at": "the moon"}}\n</tool_call>'


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> AsyncIterator[Served]:
    shared.engine.submits.clear()
    yield shared


async def test_sampling_fields_reach_the_engine(served: Served) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "max_tokens": 5,
    }
    await served.chat(**fields, logit_bias={"65": -100, "7": 1.5}, seed=3)
    sampling = served.engine.submits[0].sampling
    for name in fields.keys() - {"max_tokens"}:
        assert getattr(sampling, name) == pytest.approx(fields[name]), name
    assert dict(zip(sampling.bias_ids, sampling.bias_values, strict=True)) == {7: 1.5, 65: -100}
    assert sampling.seed == 3


async def test_defaults_change_nothing(served: Served) -> None:
    nothing = dict.fromkeys(
        ("top_p", "logprobs", "n", "max_tokens", "stop", "logit_bias", "tools", "tool_choice", "response_format")
    )
    await served.chat(top_k=-1, user="somebody", metadata={"a": "b"}, store=False, **nothing)
    sampling = served.engine.submits[0].sampling
    assert (sampling.top_k, sampling.top_p, sampling.logprobs) == (0, 1.0, False)
    assert not sampling.grammar


@pytest.mark.parametrize(
    ("fields", "temperature", "min_p"),
    [
        ({}, 0.8, 0.05),
        ({"top_p": 1, "top_k": 0}, 0.8, 0.05),
        ({"min_p": 0}, 0.8, 0),
        ({"temperature": 1}, 1, 0),
        ({"temperature": 0}, 0, 0),
        ({"top_p": 0.9}, 1, 0),
        ({"top_k": 40}, 1, 0),
        ({"min_p": 0.1}, 1, 0.1),
    ],
)
async def test_the_least_likely_tokens_are_not_drawn_where_nobody_says_how(
    served: Served, fields: dict[str, Any], temperature: float, min_p: float
) -> None:
    for ask in (served.chat, served.complete):
        await ask(**fields)
        sampling = served.engine.submits[-1].sampling
        assert (sampling.temperature, sampling.min_p) == (pytest.approx(temperature), pytest.approx(min_p))
    shown = (await served.http.get("/v1/models/tiny")).json()["sampling"]
    assert shown == {"temperature": 0.8, "min_p": 0.05}


class Opinionated(ByteAssets):
    """A model whose makers say how to draw its tokens."""

    sampling: Mapping[str, float] = {"temperature": 0.6, "top_k": 20.0, "repetition_penalty": 1.05}


async def test_a_model_s_own_defaults_hold_where_a_request_does_not_say() -> None:
    async with serving(FakeEngine(), load=lambda path: Opinionated()) as served:

        async def drawn(path: str, **fields: Any) -> tuple[float, ...]:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"} | fields
            del body["prompt" if "chat" in path else "messages"]
            assert (await served.http.post(path, json=body)).status_code == 200
            sampling = served.engine.submits[-1].sampling
            numbers = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty)
            return tuple(round(number, 3) for number in numbers)

        for path in ("/v1/chat/completions", "/v1/completions"):
            assert await drawn(path) == (0.6, 20, 1, 1.05)
            assert await drawn(path, temperature=0, top_k=-1, repetition_penalty=1) == (0, 0, 1, 1)
        for path in ("/api/chat", "/api/generate"):
            assert await drawn(path) == (0.6, 20, 0.9, 1.05)
            assert await drawn(path, options={"temperature": 0, "repeat_penalty": 1}) == (0, 20, 0.9, 1)
        assert (await served.http.get("/v1/models/tiny")).json()["sampling"] == dict(Opinionated.sampling)


async def test_logprobs_of_a_chat_add_up_to_its_text(served: Served) -> None:
    body = (await served.chat(logprobs=True, top_logprobs=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == ANSWER
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == ANSWER
    assert content[0] == {
        "token": "T",
        "logprob": -0.5,
        "bytes": [84],
        "top_logprobs": [
            {"token": "A", "logprob": -1.0, "bytes": [65]},
            {"token": "B", "logprob": -2.0, "bytes": [66]},
        ],
    }
    streamed = events_of((await served.chat(logprobs=True, stream=True)).text)[:-1]
    parts = [choice["logprobs"]["content"] for chunk in streamed for choice in chunk["choices"] if choice["logprobs"]]
    assert "".join(entry["token"] for part in parts for entry in part) == ANSWER


async def test_logprobs_of_a_completion_with_its_echoed_prompt(served: Served) -> None:
    """What lm-eval asks for: the prompt's own log-probabilities, the first token having none."""
    body = (await served.complete([[97, 98, 99]], echo=True, logprobs=1, max_tokens=1)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "abcT"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "T"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5, "A": -1.0}, {"c": -0.5, "A": -1.0}, {"T": -0.5, "A": -1.0}],
        "text_offset": [0, 1, 2, 3],
    }
    assert served.engine.submits[0].sampling.prompt_logprobs


@pytest.mark.parametrize("stream", [False, True])
async def test_no_output_tokens_leave_the_scores_of_the_prompts(served: Served, stream: bool) -> None:
    """What evaluations ask for that only want to know how likely a text is."""
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    response = await served.complete(["abc", "de"], **fields)
    chunks = events_of(response.text)[:-1] if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    shown = {choice["index"]: (choice["text"], choice["logprobs"]) for choice in choices if choice["text"]}
    assert {index: text for index, (text, _) in shown.items()} == {0: "abc", 1: "de"}
    assert shown[1][1] == {
        "tokens": ["d", "e"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"e": -0.5}],
        "text_offset": [0, 1],
    }
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length", "length"]
    assert [submit.max_tokens for submit in served.engine.submits] == [1, 1], "0 means without a limit there"
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0


async def test_no_output_tokens_and_no_echo_are_an_empty_answer(served: Served) -> None:
    (choice,) = (await served.complete("abc", max_tokens=0)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_usage_in_every_event_needs_usage(served: Served) -> None:
    for include in (False, None):
        options = {"include_usage": include, "continuous_usage_stats": True}
        assert '"usage"' not in (await served.chat(stream=True, stream_options=options)).text


class SeenMessages(ByteAssets):
    """Keeps what its template is given."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def render(self, messages: Sequence[Mapping[str, Any]], *, owner: str = "", **keywords: Any) -> str:
        self.messages = [dict(message) for message in messages]
        return "x"


async def test_a_function_of_older_clients_is_a_tool() -> None:
    seen = SeenMessages()

    async def rendered(turns: list[dict[str, Any]]) -> Any:
        messages = [{"role": "user", "content": "see"}, *turns]
        response = await served.http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 200
        return seen.messages

    function = {"name": "look", "arguments": '{"at": "x"}'}
    old = [
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "look", "content": "a moon"},
    ]
    new = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "", "type": "function", "function": function}]},
        {"role": "tool", "name": "look", "content": "a moon"},
    ]
    async with serving(FakeEngine(), load=lambda path: seen) as served:
        assert await rendered(old) == await rendered(new)


async def test_a_streamed_echo_comes_first_and_offsets_go_on(served: Served) -> None:
    request = {"echo": True, "logprobs": 0, "max_tokens": 3, "stream": True}
    chunks = events_of((await served.complete("ab", **request)).text)[:-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "ab" + ANSWER[:3]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [offset for part in logprobs for offset in part["text_offset"]] == [0, 1, 2, 3, 4]
    assert logprobs[0]["token_logprobs"] == [None, -0.5]


async def test_a_batch_is_echoed_prompt_by_prompt(served: Served) -> None:
    body = (await served.complete(["ab", "c"], echo=True, n=2, max_tokens=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["abTh", "abTh", "cTh", "cTh"]


async def test_usage_in_every_event_counts_up(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of((await served.chat(stream=True, stream_options=options)).text)[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(ANSWER) + 1
    assert chunks[-1]["choices"] == []


async def test_batch_requests_give_way(served: Served) -> None:
    for tier, priority in (("flex", 1), ("batch", 1), ("default", 0), ("auto", 0)):
        body = (await served.chat(service_tier=tier)).json()
        assert served.engine.submits[-1].priority == priority
        assert body["service_tier"] == ("flex" if priority else "default")
    messages = [{"role": "user", "content": "hi"}]
    headers = {"X-Edgepipe-Priority": "batch"}
    await served.http.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
    assert served.engine.submits[-1].priority == 1


async def test_a_schema_becomes_a_grammar(served: Served) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    await served.chat(response_format=wanted)
    assert '"city"' in served.engine.submits[0].sampling.grammar
    await served.chat(response_format={"type": "json_object"})
    assert served.engine.submits[1].sampling.grammar
    await served.chat(response_format={"type": "text"})
    assert not served.engine.submits[2].sampling.grammar


async def test_a_schema_that_would_compile_for_hours_is_refused(served: Served) -> None:
    patterns = [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(24)]
    schema = {"type": "object", "properties": {"x": {"allOf": patterns}}}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    hard, easy = await asyncio.gather(served.chat(response_format=wanted), served.chat(tools=[LOOK]))
    assert (hard.status_code, hard.json()["error"]["param"]) == (400, "response_format.json_schema.schema")
    assert easy.status_code == 200


async def test_template_keywords_reach_the_template(served: Served) -> None:
    await served.chat("x", chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert bytes(served.engine.submits[0].prompt).startswith(b"[enable_thinking=False][reasoning_effort=low]user: x")


async def test_reasoning_may_be_turned_off_beside_the_keywords(served: Served) -> None:
    """Alibaba's API has the field there, so clients of Qwen's models send it."""
    await served.chat("x", enable_thinking=False)
    await served.chat("x", enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    prompts = [bytes(submit.prompt).decode() for submit in served.engine.submits]
    assert [prompt.partition("user")[0] for prompt in prompts] == ["[enable_thinking=False]", "[enable_thinking=True]"]


@pytest.mark.parametrize("name", ["preserve_thinking", "clear_thinking"])
async def test_whether_earlier_reasoning_is_shown_again_is_for_the_template(served: Served, name: str) -> None:
    """Qwen 3.6 and GLM-4.7 name it so, and coding agents send it."""
    await served.chat("x", chat_template_kwargs={name: True})
    assert bytes(served.engine.submits[0].prompt).startswith(f"[{name}=True]user: x".encode())


async def test_a_tool_call_is_taken_out_of_the_text() -> None:
    async with serving(FakeEngine(answer=b"Let me see. " + CALL, group=7)) as served:
        body = (await served.chat(tools=[LOOK])).json()
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"]) == {"at": "the moon"}
        prompt = bytes(served.engine.submits[0].prompt).decode()
        assert '"name": "look"' in prompt  # the template knows no tools, so the model is told


async def test_a_streamed_tool_call_comes_name_first_then_arguments() -> None:
    async with serving(FakeEngine(answer=CALL, group=3)) as served:
        chunks = events_of((await served.chat(tools=[LOOK], tool_choice="required", stream=True)).text)[:-1]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
        assert {piece["index"] for piece in pieces} == {0}
        assert pieces[0]["function"]["name"] == "look"
        assert [piece["id"] for piece in pieces if "id" in piece] == [pieces[0]["id"]]
        assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"at": "the moon"}
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off_leaves_no_markup(stream: bool) -> None:
    async with serving(FakeEngine(answer=b"\n" + CALL, group=3)) as served:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"max_tokens": 8}, "length"),
            ({"max_tokens": 30}, "length"),
            ({"stop": "oon"}, "stop"),
            ({"stop": "ol_ca"}, "stop"),
        ]
        for fields, reason in cases:
            response = await served.chat(tools=[LOOK], stream=stream, **fields)
            chunks = events_of(response.text)[:-1] if stream else [response.json()]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            messages = [choice["delta" if stream else "message"] for choice in choices]
            assert "".join(message.get("content") or "" for message in messages) == "", fields
            assert choices[-1]["finish_reason"] == reason
            pieces = [piece for message in messages for piece in message.get("tool_calls", ())]
            arguments = "".join(piece["function"]["arguments"] for piece in pieces)
            assert arguments == ('{"at": "the m' if fields.get("stop") == "oon" else "")


async def test_without_tools_what_looks_like_a_call_is_text() -> None:
    async with serving(FakeEngine(answer=CALL)) as served:
        for more in ({}, {"tools": [LOOK], "tool_choice": "none"}):
            choice = (await served.chat(**more)).json()["choices"][0]
            assert choice["message"]["content"] == CALL.decode()
            assert choice["finish_reason"] == "stop"


async def test_an_earlier_call_reaches_the_template_as_an_object(served: Served) -> None:
    """Templates print arguments as JSON; as text they would be escaped twice."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    messages = [
        {"role": "user", "content": "see"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a moon"},
    ]
    response = await served.http.post("/v1/chat/completions", json={"messages": messages, "tools": [LOOK]})
    assert response.status_code == 200


async def test_text_is_never_cut_inside_a_character() -> None:
    text = "größer 東京 🚀 naïve"
    async with serving(FakeEngine(answer=text.encode())) as served:
        chunks = events_of((await served.chat(stream=True)).text)[:-1]
        pieces = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("group", [1, 2, 5, 31])
async def test_no_part_of_a_stop_string_is_ever_seen(group: int) -> None:
    async with serving(FakeEngine(group=group)) as served:
        chunks = events_of((await served.chat(stream=True, stop=["of France", "of Spain"])).text)[:-1]
        pieces = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        assert "".join(pieces) == "The capital "
