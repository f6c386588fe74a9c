"""Reading a long call costs each token the same: no reader copies or rereads what came before it."""

from __future__ import annotations

import importlib
import pkgutil
import tracemalloc
from dataclasses import replace

import pytest

from edgepipe.gateway import formats
from edgepipe.gateway.answer_reader import AnswerFormat, AnswerReader
from edgepipe.gateway.answer_stops import answer_stops
from edgepipe.gateway.formats.chat_format import ChatFormat, Reasoning
from edgepipe.gateway.text import Stops

FUNCTIONS: dict[str, dict[str, object]] = {"f": {"properties": {"a": {}, "s": {"type": "string"}}}}
NUM_CHARS = 6000
PIECES = ("abcd" * 8, " " * 32, '{"a":' * 6, "[1,(" * 8, '\\"' * 16)
OPENINGS = (
    "",
    "x",
    "<think>",
    "<|channel>thought",
    "<|channel|>analysis<|message|>",
    '<tool_call>\n{"name": "f", "arguments": ',
    '<tool_call>\n{"name": "f", "arguments": "',
    '<tool_call>\n{"name": "f", "arguments": {"a": "',
    '<tool_call>\n{"arguments": {"a": "',
    '<tool_call>\n{"arguments": "',
    '{"name": "f", "parameters": "',
    '[TOOL_CALLS][{"name": "f", "arguments": "',
    "[TOOL_CALLS]f[ARGS]{",
    "<|tool_call_start|>[f(a=",
    "<|tool_call_start|>[f(a='",
    "<|tool_call_start|>[f(a=(",
    "<function_calls>f(a='",
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
    "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>",
    "<tool_call>\n<function=f>\n<parameter=a>\n",
    "<tool_call>\n<function=f>\n<parameter=s>\n",
    "<|tool_call>call:f{a:",
    '<|tool_call>call:f{a:<|"|>',
    '<|tool_call>call:f{a:"',
    "<|channel|>commentary to=functions.f <|message|>{",
    '<|START_ACTION|>[{"tool_name": "f", "parameters": "',
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
    "<seed:tool_call>\n<function=f>\n<parameter=s>",
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">',
    "<think>a</think><response>b",
    "<think>a</think><response>b</response>",
)


def _all_formats() -> list[ChatFormat]:
    modules = [
        importlib.import_module(f"{formats.__name__}.{each.name}") for each in pkgutil.iter_modules(formats.__path__)
    ]
    found = {
        value.name: value for module in modules for value in vars(module).values() if isinstance(value, ChatFormat)
    }
    thinking = replace(found["granite"], name="granite, thinking", reasoning=Reasoning("<think>", "</think>"))
    return [*found.values(), thinking]


def _least_copied(reader: AnswerReader | Stops, piece: str) -> int:
    """The bytes that reading one more piece holds at most, for the cheapest of some pieces: lists grow now and then."""
    tracemalloc.start()
    try:
        peaks: list[int] = []
        for _ in range(16):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            reader.push(piece)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return min(peaks)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("chat", _all_formats(), ids=lambda chat: chat.name)
def test_a_token_of_a_long_answer_costs_as_much_as_one_of_a_short_answer(chat: ChatFormat) -> None:
    for opening in OPENINGS:
        for piece in PIECES:
            reader = AnswerReader(AnswerFormat(chat=chat, functions=FUNCTIONS), new_id=lambda index: "call")
            reader.push(opening)
            for _ in range(NUM_CHARS // len(piece)):
                reader.push(piece)
            assert _least_copied(reader, piece) < NUM_CHARS // 2, (opening, piece)


@pytest.mark.parametrize(
    "opening", ["", "\n<think>", "<think>a</think>", "<|channel|>analysis<|message|>", "<|channel>"]
)
@pytest.mark.parametrize("chat", [chat for chat in _all_formats() if chat.reasons], ids=lambda chat: chat.name)
def test_a_token_costs_the_same_where_stop_strings_are_matched(chat: ChatFormat, opening: str) -> None:
    for piece in PIECES:
        stops = answer_stops(["never", "\n\n"], AnswerFormat(chat=chat))
        stops.push(opening)
        for _ in range(NUM_CHARS // len(piece)):
            stops.push(piece)
        assert _least_copied(stops, piece) < NUM_CHARS // 2, (opening, piece)
