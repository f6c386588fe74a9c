"""Chat and completions through real HTTP, over an engine that speaks the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from edgepipe.errors import StageLost
from edgepipe.gateway.connections import ConnectionLimits
from edgepipe.gateway.engine_link import LinkLimits
from tests.support.gateways.fake_engine import CONTEXT, END, FakeEngine, start_engine, view_of
from tests.support.gateways.server import Served, events_of, serving

ANSWER = FakeEngine().answer.decode()
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


async def test_an_answer_has_every_field_that_openai_s_schema_requires(served: Served) -> None:
    body = (await served.chat("Where is Paris?", model="tiny")).json()
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(body)
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = "user: Where is Paris?\nassistant:"
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == len(ANSWER) + 1


async def test_the_engine_gets_what_was_asked_for(served: Served) -> None:
    await served.chat("x", max_completion_tokens=3, temperature=0.5, seed=-1, stop_token_ids=[9], ignore_eos=True)
    submit = served.engine.submits[0]
    assert bytes(submit.prompt) == b"user: x\nassistant:"
    assert submit.max_tokens == 3
    assert (submit.sampling.temperature, submit.sampling.seed) == (0.5, (1 << 64) - 1)
    assert (list(submit.stop_token_ids), submit.ignore_eos) == ([9], True)


async def test_a_request_without_a_seed_gets_one(served: Served) -> None:
    await served.chat()
    assert served.engine.submits[0].sampling.seed == 7


async def test_without_max_tokens_a_chat_may_fill_the_context(served: Served) -> None:
    await served.chat("x")
    submit = served.engine.submits[0]
    assert submit.max_tokens == CONTEXT - len(submit.prompt)


async def test_minus_one_token_are_as_many_as_fit(served: Served) -> None:
    """LM Studio's examples say so, and llama.cpp's; a completion without it has 16."""
    await served.chat("x", max_tokens=-1)
    await served.chat("x", max_completion_tokens=-1)
    await served.complete("x", max_tokens=-1)
    assert [len(each.prompt) + each.max_tokens for each in served.engine.submits] == [CONTEXT] * 3


async def test_max_tokens_ends_the_answer_with_length(served: Served) -> None:
    body = (await served.chat(max_tokens=3)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == ANSWER[:3]
    assert body["usage"]["completion_tokens"] == 3


async def test_a_stream_begins_with_the_role_and_ends_with_usage_and_done(served: Served) -> None:
    response = await served.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events_of(response.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ANSWER) + 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == ANSWER
    assert [choice["finish_reason"] for choice in deltas].count("stop") == 1


async def test_choices_of_one_request_are_told_apart() -> None:
    async with serving(FakeEngine(group=4)) as served:
        whole = (await served.chat(n=3)).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert served.engine.submits[0].num_choices == 3
        streamed = events_of((await served.chat(n=3, stream=True)).text)[:-1]
        for index in range(3):
            parts = [c for chunk in streamed for c in chunk["choices"] if c["index"] == index]
            assert "".join(part["delta"].get("content", "") for part in parts) == ANSWER


async def test_a_stop_string_cuts_the_answer_and_cancels_the_rest(served: Served) -> None:
    body = (await served.chat(stop=["Paris", "never"])).json()
    assert body["choices"][0]["message"]["content"] == "The capital of France is "
    assert body["choices"][0]["finish_reason"] == "stop"
    tokens_until_stop = ANSWER.index("Paris") + len("Paris")
    assert body["usage"]["completion_tokens"] == tokens_until_stop
    async with asyncio.timeout(5):
        await served.engine.cancelled.wait()
    assert served.engine.cancels[0].at_position == tokens_until_stop


async def test_an_editor_s_list_of_stop_strings_is_taken(served: Served) -> None:
    """Continue sends as many as a language has keywords; OpenAI takes four."""
    stops = [
        f"\n{word}" for word in "class def function import export const let var type enum mod pub fn impl use".split()
    ]
    body = (await served.chat(stop=[*stops, "<|fim_prefix|>", " Paris"])).json()
    assert body["choices"][0]["message"]["content"] == "The capital of France is"


@pytest.mark.parametrize("stop", ["", [""], ["", None, " of "], [None, "capital"]])
async def test_stop_strings_without_text_are_left_out(served: Served, stop: object) -> None:
    answer = (await served.chat(stop=stop)).json()["choices"][0]["message"]["content"]
    text = "The capital of France is Paris."
    shown = [each for each in stop if each] if isinstance(stop, list) else []
    assert answer == (text.partition(shown[0])[0] if shown else text)


async def test_completions_take_text_ids_and_lists_of_either(served: Served) -> None:
    for prompt, expected in (
        ("ab", [b"ab"]),
        ([97, 98], [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
        (["a", [98]], [b"a", b"b"]),
    ):
        served.engine.submits.clear()
        body = (await served.complete(prompt, max_tokens=4, n=2)).json()
        assert [bytes(submit.prompt) for submit in served.engine.submits] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
        assert {choice["text"] for choice in body["choices"]} == {ANSWER[:4]}
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert body["usage"]["completion_tokens"] == 8 * len(expected)


async def test_completions_end_after_16_tokens_by_default(served: Served) -> None:
    assert (await served.complete()).json()["choices"][0]["text"] == ANSWER[:16]


async def test_token_ids_come_back_on_request_whole_and_streamed(served: Served) -> None:
    ids = [*ANSWER.encode(), END]
    whole = (await served.complete("ab", max_tokens=64, return_token_ids=True)).json()
    assert whole["choices"][0]["token_ids"] == ids
    assert whole["choices"][0]["prompt_token_ids"] == [97, 98]
    streamed = events_of((await served.complete("ab", max_tokens=64, return_token_ids=True, stream=True)).text)[:-1]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert [i for chunk in streamed for i in chunk["choices"][0]["token_ids"]] == ids
    chat = (await served.chat("x", return_token_ids=True)).json()
    assert chat["choices"][0]["token_ids"] == ids
    assert bytes(chat["prompt_token_ids"]) == b"user: x\nassistant:"


async def test_content_may_be_parts_or_null(served: Served) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": None},
        {"role": "assistant", "content": None, "reasoning_content": "cut off in the reasoning"},
        {"role": "user", "content": "c"},
    ]
    response = await served.http.post("/v1/chat/completions", json={"messages": messages, "user": "u", "store": False})
    assert response.status_code == 200
    prompt = bytes(served.engine.submits[0].prompt)
    assert prompt.startswith(b"user: ab\nassistant: <tool_call>")  # as text, since this template knows no calls
    assert prompt.endswith(b"\nuser: c\nassistant:")


async def test_a_client_that_leaves_a_stream_cancels_its_request() -> None:
    async with serving(FakeEngine(hold_after=4)) as served:
        async with served.http.stream("POST", "/v1/chat/completions", json=_body(stream=True)) as response:
            await _until_text(response.aiter_lines(), 3)
        async with asyncio.timeout(5):
            await served.engine.cancelled.wait()


async def test_a_client_that_leaves_before_the_answer_cancels_its_request() -> None:
    async with serving(FakeEngine(hold_after=0)) as served:
        request = asyncio.create_task(served.chat())
        async with asyncio.timeout(5):
            await served.engine.submitted.wait()
            request.cancel()
            await served.engine.cancelled.wait()


async def test_a_broken_stream_is_resumed_and_the_client_sees_nothing() -> None:
    async with serving(FakeEngine(hold_after=4)) as served:
        async with served.http.stream("POST", "/v1/chat/completions", json=_body(stream=True)) as response:
            lines = response.aiter_lines()
            seen = await _until_text(lines, 4)
            served.engine.break_stream.set()
            served.engine.release.set()
            seen += [line async for line in lines if line]
        assert served.engine.num_streams == 2
        assert [resume.have[0] >= 4 for resume in served.engine.resumes] == [True]
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events_of("\n\n".join(seen))[:-1]]
        assert "".join(deltas) == ANSWER


async def test_an_engine_that_was_started_again_goes_on_with_what_the_client_has() -> None:
    async with serving(FakeEngine(hold_after=4)) as served:
        async with served.http.stream("POST", "/v1/chat/completions", json=_body(stream=True)) as response:
            lines = response.aiter_lines()
            seen = await _until_text(lines, 4)
            served.engine.engine_id = "engine-2"
            served.engine.break_stream.set()
            served.engine.release.set()
            seen += [line async for line in lines if line]
        first, second = served.engine.submits
        assert (first.attempt, second.attempt) == (1, 2)
        assert bytes(second.generated[0].ids) == ANSWER.encode()[: len(second.generated[0].ids)]
        assert len(second.generated[0].ids) >= 4
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events_of("\n\n".join(seen))[:-1]]
        assert "".join(deltas) == ANSWER


async def test_what_an_engine_has_forgotten_is_submitted_again() -> None:
    async with serving(FakeEngine(hold_after=4, forgets=True)) as served:
        async with served.http.stream("POST", "/v1/chat/completions", json=_body(stream=True)) as response:
            lines = response.aiter_lines()
            seen = await _until_text(lines, 4)
            served.engine.break_stream.set()
            served.engine.release.set()
            seen += [line async for line in lines if line]
        assert [submit.attempt for submit in served.engine.submits] == [1, 2]
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events_of("\n\n".join(seen))[:-1]]
        assert "".join(deltas) == ANSWER


async def test_a_request_follows_its_engine_to_another_place() -> None:
    other = FakeEngine(engine_id="engine-2")
    server, address = await start_engine(other)
    async with serving(FakeEngine(hold_after=4)) as served:
        async with served.http.stream("POST", "/v1/chat/completions", json=_body(stream=True)) as response:
            lines = response.aiter_lines()
            seen = await _until_text(lines, 4)
            served.gateway.update(view_of())  # its node is gone
            await served.server.stop(None)
            served.gateway.update(view_of(address))
            seen += [line async for line in lines if line]
        assert [submit.attempt for submit in other.submits] == [2]
        deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events_of("\n\n".join(seen))[:-1]]
        assert "".join(deltas) == ANSWER
    await server.stop(None)


async def test_an_engine_s_error_is_the_answer_s_status() -> None:
    error = StageLost("stage 1 ended", fact="exit status -9", next_step="send the request again", node="b")
    async with serving(FakeEngine(error=error, hold_after=0)) as served:
        response = await served.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "stage_lost"
        assert "exit status -9" in response.json()["error"]["message"]
        assert "Traceback" not in response.text


async def test_an_engine_s_error_after_the_first_token_is_the_stream_s_one_ending() -> None:
    async with serving(FakeEngine(error=StageLost("stage 1 ended"), hold_after=3)) as served:
        events = events_of((await served.chat(stream=True)).text)
        assert events[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in events
        assert all(c["finish_reason"] is None for event in events[:-1] for c in event["choices"])


async def test_an_answer_under_way_when_the_node_stops_ends_with_an_error() -> None:
    async with serving(FakeEngine(hold_after=3), connections=ConnectionLimits(stop_s=0.05)) as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            parts = response.aiter_text()
            begun = await anext(parts)
            served.answering.cancel()
            text = begun + "".join([part async for part in parts])
        await asyncio.wait((served.answering,))
        assert events_of(text)[-1]["error"]["edgepipe"]["what"] == "this node was stopped"


async def test_an_engine_that_leaves_the_view_ends_its_requests_with_the_daemon_s_reason() -> None:
    async with serving(FakeEngine(hold_after=0)) as served:
        request = asyncio.create_task(served.chat())
        await served.engine.submitted.wait()
        served.gateway.update(view_of(served.address, state="failed", error=StageLost("node b has left")))
        response = await request
        assert response.status_code == 503
        assert "node b has left" in response.json()["error"]["message"]


async def test_an_engine_that_cannot_be_reached_gives_503_within_the_window() -> None:
    async with serving(FakeEngine(), limits=LinkLimits(resume_window_s=0.2)) as served:
        await served.server.stop(None)
        response = await served.chat()
        assert response.status_code == 503
        assert "does not answer" in response.json()["error"]["message"]


async def test_more_requests_than_there_is_room_for_get_429() -> None:
    async with serving(FakeEngine(hold_after=0), limits=LinkLimits(max_requests=1)) as served:
        first = asyncio.create_task(served.chat())
        await served.engine.submitted.wait()
        for stream in (False, True):
            refused = await served.chat(stream=stream)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        served.engine.release.set()
        assert (await first).status_code == 200


def _body(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


async def _until_text(lines: AsyncIterator[str], num_chars: int) -> list[str]:
    """Lines of a stream until so many characters of the answer have come."""
    seen: list[str] = []
    text = ""
    while len(text) < num_chars:
        line = await anext(lines)
        if line:
            seen.append(line)
            text += events_of(line)[0]["choices"][0]["delta"].get("content", "")
    return seen
