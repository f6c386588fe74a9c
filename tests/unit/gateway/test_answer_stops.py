"""Stop strings end an answer, and no reasoning before it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.answer_reader import AnswerFormat
from edgepipe.gateway.answer_stops import answer_stops
from edgepipe.gateway.formats.chat_format import ChatFormat, Reasoning
from edgepipe.gateway.formats.detect import FORMATS
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import events_of, serving

BY_NAME = {known.name: known for known in FORMATS}
THINKING = replace(BY_NAME["hermes"], reasoning=Reasoning("<think>", "</think>"))


class ReasoningAssets(ByteAssets):
    """The byte tokenizer of a model whose answers have this format."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat


STOPS = {"STOP": "Two.\n", "\n": "Two.", "n": "Two.\nSTOP three", "assistant": "Two.\nSTOP three"}
ANSWERS: dict[str, tuple[ChatFormat, str]] = {
    "hermes": (THINKING, "\n<think>\nOne. STOP?\n</think>\n\nTwo.\nSTOP three"),
    "gemma4": (BY_NAME["gemma4"], "<|channel>thought\nOne. STOP?<channel|>Two.\nSTOP three"),
    "harmony": (
        BY_NAME["harmony"],
        "<|channel|>analysis<|message|>One. STOP?<|end|><|start|>assistant<|channel|>final<|message|>Two.\nSTOP three",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stop_string_in_the_reasoning_does_not_end_the_answer(name: str) -> None:
    chat, text = ANSWERS[name]
    async with serving(FakeEngine(answer=text.encode(), group=3), load=lambda path: ReasoningAssets(chat)) as served:
        for stop, content in STOPS.items():
            streamed = events_of((await served.chat(stop=stop, stream=True)).text)
            choices = [choice for event in streamed[:-1] for choice in event["choices"]]
            assert_stopped(choices, [choice["delta"] for choice in choices], content)
            choices = (await served.chat(stop=stop)).json()["choices"]
            assert_stopped(choices, [choice["message"] for choice in choices], content)


def assert_stopped(choices: list[dict[str, Any]], parts: list[dict[str, Any]], content: str) -> None:
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "One. STOP?"
    assert "".join(part.get("content") or "" for part in parts) == content
    assert choices[-1]["finish_reason"] == "stop"


async def test_a_plain_completion_stops_wherever_the_stop_string_is() -> None:
    engine = FakeEngine(answer=ANSWERS["hermes"][1].encode(), group=3)
    async with serving(engine, load=lambda path: ReasoningAssets(THINKING)) as served:
        asked = {"model": "tiny", "prompt": "hi", "stop": "STOP", "max_tokens": 99}
        (choice,) = (await served.http.post("/v1/completions", json=asked)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("\n<think>\nOne. ", "stop")


@pytest.mark.parametrize(
    ("text", "inside", "stops", "shown", "stopped"),
    [
        ("one\n\ntwo</think>\n\nthree\n\nfour", True, ["\n\n"], "one\n\ntwo</think>\n\nthree", "\n\n"),
        ("one two", True, ["two"], "one two", ""),
        ("one</think>two", True, ["</think>"], "one", "</think>"),
        ("one <think>two", False, ["two"], "one <think>", "two"),
        (" \n", False, ["\n"], " ", "\n"),
        ("<thi", False, ["thi"], "<", "thi"),
        ("<think>a</thi", False, ["thi"], "<think>a</thi", ""),
        ("<think>a</think> b</think>c", False, ["</think>c"], "<think>a</think> b", "</think>c"),
        ("<think>a</think> <think>b c", False, ["b"], "<think>a</think> <think>", "b"),
    ],
)
def test_reasoning_and_the_spaces_after_it_are_no_answer(
    text: str, inside: bool, stops: list[str], shown: str, stopped: str
) -> None:
    assert read(THINKING, [text], stops, inside=inside) == (shown, stopped)
    assert read(THINKING, list(text), stops, inside=inside) == (shown, stopped)


def read(chat: ChatFormat, pieces: list[str], stops: list[str], *, inside: bool = False) -> tuple[str, str]:
    matcher = answer_stops(stops, AnswerFormat(chat=chat, in_reasoning=inside))
    shown: list[str] = []
    for piece in pieces:
        part, stopped = matcher.push(piece)
        shown.append(part)
        if stopped:
            return "".join(shown), stopped
    part, stopped = matcher.finish()
    return "".join(shown) + part, stopped


SCRAPS = ["a", "b", " ", "\n", "<", "<think>", "</think>", "<|channel>", "thought", "<channel|>", "<|channel|>"]
SCRAPS += ["analysis", "final", "<|message|>", "<|end|>", "<|start|>", "to=functions.f"]


@given(
    chat=st.sampled_from([THINKING, BY_NAME["gemma4"], BY_NAME["harmony"]]),
    text=st.lists(st.sampled_from(SCRAPS), max_size=20).map("".join),
    size=st.integers(1, 9),
    inside=st.booleans(),
)
def test_the_cuts_of_a_text_change_nothing(chat: ChatFormat, text: str, size: int, inside: bool) -> None:
    inside = inside and not chat.has_channels
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for stops in (["ab"], ["\n", "b"]):
        assert read(chat, pieces, stops, inside=inside) == read(chat, list(text), stops, inside=inside)
    assert read(chat, pieces, ["never"], inside=inside) == (text, ""), "no text is lost"
