"""Formats whose calls follow each other in a section between two marks: those of DeepSeek V3 and Kimi K2."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import any_call, lazy_opening, written_json
from edgepipe.gateway.formats.named import NamedReader
from edgepipe.gateway.tool_call_json import CallArguments, CallNews
from edgepipe.gateway.tool_calls import Call
from edgepipe.sampling.grammar import json_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The texts of a section: OPENING CALL before NAME [number N] between JSON after CALL_END ... CLOSING."""

    opening: str
    closing: str
    call: str
    call_end: str
    between: str
    head: re.Pattern[str]  # a call up to its arguments, as models write it; group 1 is the name
    before: str = ""
    number: str = ""  # text before the number of a call; empty: calls have none
    after: str = ""
    joint: str = ""  # text between two calls
    also_ends: tuple[str, ...] = ()  # marks that end arguments, besides
    lacks_opening: bool = False  # models may leave the opening out
    more_marks: tuple[str, ...] = ()  # tokens within a call


def section_format(name: str, section: Section) -> ChatFormat:
    """Make the format of these texts."""

    def reader(calls: CallNews, functions: Functions) -> NamedReader:
        return NamedReader(
            calls,
            functions,
            opening=section.opening,
            head=section.head,
            closings=(*section.also_ends, section.call_end, section.closing),
            next_call=section.call,
            lacks_opening=section.lacks_opening,
            arguments=CallArguments,
        )

    def rules(functions: Functions, form: CallForm) -> list[str]:
        number = f"{_quoted(section.number)} /[0-9]{{1,4}}/" if section.number else ""
        calls = [
            f"call_{index}: {_quoted(section.call + section.before + name)} {number} {_quoted(section.between)} "
            f"{json_rule(schema)} {_quoted(section.after + section.call_end)}"
            for index, (name, schema) in enumerate(functions.items())
        ]
        more = f"({_quoted(section.joint) if section.joint else ''} call)*" if form.several else ""
        group = f"call {more} {_quoted(section.closing)}"
        calls.insert(0, any_call(len(calls)))
        if form.forced:
            return [f"answer: {_quoted(section.opening)} {group}", *calls]
        return ["answer: group | PLAIN", f"group: opening {group}", lazy_opening(section.opening), *calls]

    def write(calls: Sequence[Call]) -> str:
        texts = [
            f"{section.call}{section.before}{call.name}{f'{section.number}{index}' if section.number else ''}"
            f"{section.between}{written_json(call.arguments)}{section.after}{section.call_end}"
            for index, call in enumerate(calls)
        ]
        return section.opening + section.joint.join(texts) + section.closing

    marks = (section.opening, section.closing, section.call, *section.more_marks, section.call_end)
    return ChatFormat(name=name, marks=marks, new_reader=reader, call_rules=rules, write=write)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
