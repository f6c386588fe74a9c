"""Texts that go on with a prompt, over HTTP, with a SentencePiece tokenizer: no space is lost, none comes unasked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from edgepipe.gateway.assets import ModelAssets
from edgepipe.text.encoding import LongTextEncoder
from edgepipe.text.template import ChatTemplate, TemplateRenderer
from edgepipe.text.tokenizer import Tokenizer
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, events_of, serving

TOKENS = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "i", "s", "is", "▁is", "▁Pa", "ris", "."]
BOS, E_BEGIN, E_END, IS, PA, RIS = 1, 3, 4, 9, 10, 11
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def sentence_piece_assets(path: Path) -> ModelAssets:
    """Llama 2's way: encoding puts a space before the first word, and decoding takes it off."""
    kinds = [2, 3, 3, 6, 6, *[1] * (len(TOKENS) - 5)]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [float(len(token)) for token in TOKENS],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": BOS,
    }
    renderer = TemplateRenderer(ChatTemplate(sources={"default": TEMPLATE}))
    return ModelAssets(Tokenizer.from_gguf(metadata), renderer, LongTextEncoder(path / "tokenizer.json"))


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    """A gateway over an engine that always answers " Paris"."""
    async with serving(FakeEngine(answer=bytes([PA, RIS])), load=sentence_piece_assets) as value:
        yield value


def text_of(body: dict[str, Any]) -> str:
    return body["choices"][0]["text"]


async def test_a_completion_keeps_the_space_before_its_first_word(served: Served) -> None:
    assert text_of((await served.complete("is")).json()) == " Paris"
    assert text_of((await served.complete([BOS, IS])).json()) == " Paris"
    assert text_of((await served.complete("is", echo=True)).json()) == "is Paris"
    assert text_of((await served.complete([IS], echo=True)).json()) == "is Paris"


async def test_a_streamed_completion_keeps_the_space_before_its_first_word(served: Served) -> None:
    for echo, whole in ((False, " Paris"), (True, "is Paris")):
        streamed = await served.complete("is", echo=echo, stream=True)
        assert "".join(text_of(event) for event in events_of(streamed.text)[:-1]) == whole


async def test_a_completion_of_nothing_begins_without_a_space(served: Served) -> None:
    assert text_of((await served.complete([BOS])).json()) == "Paris"


async def test_a_stop_string_that_begins_with_a_space_is_found(served: Served) -> None:
    (choice,) = (await served.complete("is", stop=" Paris")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


async def test_a_chat_answer_begins_without_a_space(served: Served) -> None:
    assert (await served.chat("is")).json()["choices"][0]["message"]["content"] == "Paris"
    streamed = events_of((await served.chat("is", stream=True)).text)[:-1]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == "Paris"


async def test_ollamas_raw_prompts_go_on_and_others_begin(served: Served) -> None:
    for raw, text in ((True, " Paris"), (False, "Paris")):
        body = {"model": "tiny", "prompt": "is", "raw": raw, "stream": False}
        assert (await served.http.post("/api/generate", json=body)).json()["response"] == text
    lines = (await served.http.post("/api/generate", json={"model": "tiny", "prompt": "is", "raw": True})).text
    assert "".join(json.loads(line)["response"] for line in lines.splitlines()) == " Paris"


async def test_a_character_that_the_prompt_leaves_incomplete_comes_whole(served: Served) -> None:
    served.engine.answer = bytes([E_END, PA])
    assert text_of((await served.complete([IS, E_BEGIN], echo=True)).json()) == "isé Pa"
    assert text_of((await served.complete([IS, E_BEGIN])).json()) == "é Pa"


async def test_offsets_of_logprobs_are_those_of_the_text(served: Served) -> None:
    answer = (await served.complete("is", echo=True, logprobs=0)).json()
    offsets = answer["choices"][0]["logprobs"]["text_offset"]
    assert (text_of(answer), offsets[:4]) == ("is Paris", [0, 0, 2, 5])
    answer = (await served.complete("is", logprobs=0)).json()
    assert answer["choices"][0]["logprobs"]["text_offset"][:2] == [0, 3]
