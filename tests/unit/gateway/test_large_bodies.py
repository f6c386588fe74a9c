"""Bodies that are read in another process mean what they would mean here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.requests import Request

from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.errors import ModelInvalid
from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.body_child import BAD, GOOD, answer, kind_name, pack, unpack
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from edgepipe.gateway.shares import memory_shares
from edgepipe.gateway.strict_body import StrictBody, validate
from edgepipe.store.store import StoredModel
from edgepipe.text.encoding import LongTextEncoder
from tests.support.gateways.fake_engine import CONTEXT
from tests.support.gateways.server import Served

WIDE = 200 << 10  # characters: more than is parsed on the loop
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "x": [1, 2.5, None]}}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (
            ChatBody,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a\u0000ü"}, {"type": "text", "text": "🚀"}]},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                ],
                "stop": "x",
                "logit_bias": {"7": 1.5, "9": -3},
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "look"}},
                "seed": -(1 << 63),
                "stream": True,
                "stream_options": {"include_usage": True},
                "unknown": [1],
            },
        ),
        (CompletionBody, {"prompt": ["text", [1, 2, 3], [(1 << 31) - 1]], "echo": True, "logprobs": 0}),
        (CompletionBody, {"prompt": "text", "temperature": 0.1}),
        (CompletionBody, {"prompt": [4, 5]}),
        (DetokenizeBody, {"tokens": [1, 70_000]}),
        (TokenizeBody, {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}),
    ],
)
def test_what_is_packed_is_unpacked(kind: type[StrictBody], fields: dict[str, Any]) -> None:
    body: BaseModel = validate(kind, fields)
    assert unpack(kind, memoryview(pack(validate(kind, fields)))) == body


def test_the_child_answers_with_the_body_or_with_what_is_wrong() -> None:
    def asked(body: bytes, context: int = 0) -> bytes:
        return answer(b'{"kind": "%s", "context": %d}\n%s' % (kind_name(CompletionBody).encode(), context, body))

    good = asked(b'{"prompt": [1, 2]}')
    assert good[:1] == GOOD
    assert unpack(CompletionBody, memoryview(good)[1:]).prompt == [[1, 2]]
    for body, code in (
        (b'{"prompt": NaN}', b"invalid_json"),
        (b'{"prompt": "x", "n": 1, "n": 2}', b"invalid_json"),
        (b'{"prompt": "x", "n": 0}', b"invalid_value"),
        (b'{"prompt": "x", "suffix": "y"}', b"unsupported_parameter"),
        (b'{"prompt": [1, 2, 3]}', b"context_length_exceeded"),
    ):
        bad = asked(body, context=3)
        assert bad[:1] == BAD
        assert code in bad


async def test_large_bodies_are_served_and_refused_as_small_ones(served: Served) -> None:
    wide = " " * WIDE
    answer = (await served.complete("ab", user=None, junk=wide)).json()
    assert answer["usage"]["prompt_tokens"] == 2
    answer = (await served.complete([[97, 98], [99]], junk=wide, max_tokens=2, echo=True)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abTh", "cTh"]
    for response, code in (
        (await served.complete([97] * 100_000), "context_length_exceeded"),
        (await served.complete("x" * WIDE), "context_length_exceeded"),
        (await served.chat("x" * WIDE), "context_length_exceeded"),
        (await served.complete("x", n=0, junk=wide), "invalid_value"),
        (await served.chat(model="y" * 300, junk=wide), "invalid_value"),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == code
    answer = (await served.http.post("/detokenize", json={"tokens": [97, 98], "junk": wide})).json()
    assert answer == {"prompt": "ab"}
    answer = (await served.http.post("/tokenize", json={"prompt": "x" * WIDE})).json()
    assert answer["count"] == WIDE
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": False, "junk": wide}
    assert (await served.http.post("/api/chat", json=body)).json()["done"]
    assert len(served.engine.submits[-1].prompt) < CONTEXT


class DiesOnce(WarmChild):
    """A reader whose process ends at the first question."""

    asked = 0

    async def ask(self, *parts: bytes, **bounds: Any) -> bytes:
        """Ask in vain at first."""
        self.asked += 1
        if self.asked == 1:
            await super().ask(b"no question", **bounds)  # what it cannot read ends it
        return await super().ask(*parts, **bounds)


async def test_a_reader_that_ends_is_told_and_replaced() -> None:
    child = DiesOnce("edgepipe.gateway.body_child", start_s=20)
    reader = BodyReader(models=ModelTable(), body_s=20, child=child)
    body = json.dumps({"prompt": "ab", "junk": " " * WIDE}).encode()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    def request() -> Request:
        state = {"owner": "", "memory": memory_shares(16 << 20).holding("")}
        return Request({"type": "http", "headers": [(b"content-type", b"application/json")], "state": state}, receive)

    try:
        with pytest.raises(HttpProblem) as caught:
            await reader.read(request(), CompletionBody)
        assert caught.value.status == 503
        assert caught.value.headers["Retry-After"] == "1"
        assert (await reader.read(request(), CompletionBody)).prompt == ["ab"]
    finally:
        await child.end()


async def test_a_child_that_does_not_start_says_so() -> None:
    with pytest.raises(ChildEnded) as caught:
        await WarmChild("edgepipe.no_such_module", start_s=20).start()
    assert not caught.value.started


async def test_a_closed_child_starts_no_more_and_refuses_requests_that_wait() -> None:
    child = WarmChild("edgepipe.gateway.body_child", start_s=20)
    question = b'{"kind": "%s", "context": 0}\n{"prompt": "x"}' % kind_name(CompletionBody).encode()

    async def ask() -> bytes:
        return await child.ask(question, within_s=20, most_bytes=2000)

    assert (await ask())[:1] == GOOD
    waiting = [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(0)
    await child.close()
    refused = [each for each in await asyncio.gather(*waiting, return_exceptions=True) if not isinstance(each, bytes)]
    with pytest.raises(ChildEnded) as caught:
        await ask()
    assert all(isinstance(each, ChildEnded) for each in refused)
    assert len(refused) >= 2
    assert not caught.value.started


async def test_an_answer_beyond_its_bound_ends_the_child_unread() -> None:
    child = WarmChild("edgepipe.gateway.body_child", start_s=20)
    question = b'{"kind": "%s", "context": 0}\n{"prompt": "%s"}' % (kind_name(CompletionBody).encode(), b"x" * 1000)
    try:
        with pytest.raises(ChildEnded) as caught:
            await child.ask(question, within_s=20, most_bytes=900)
        assert caught.value.started
        assert (await child.ask(question, within_s=20, most_bytes=2000))[:1] == GOOD
    finally:
        await child.end()


async def test_long_texts_have_the_same_tokens_in_another_process(demo_model: StoredModel) -> None:
    text = "The quick brown fox, größer als 東京. " * 50
    encoder = LongTextEncoder(demo_model.tokenizer_path)
    try:
        ids = demo_model.tokenizer().encode(text, add_special=False)
        assert await encoder.encode(text, add_special=False, at_most=len(ids)) == (len(ids), ids)
        assert await encoder.encode(text, add_special=False, at_most=len(ids) - 1) == (len(ids), [])
    finally:
        await encoder.close()


async def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    encoder = LongTextEncoder(tmp_path / "tokenizer.json")
    try:
        with pytest.raises(ModelInvalid):
            await encoder.encode("x", add_special=False, at_most=9)
    finally:
        await encoder.close()
