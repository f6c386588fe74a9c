"""DeepSeek's calls. Sources: the chat templates of DeepSeek-V3-0324, V3.1, V3.2 and V4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import any_call, lazy_opening, written_json
from edgepipe.gateway.formats.named import NamedReader
from edgepipe.gateway.formats.tagged import Tags, tagged_format
from edgepipe.gateway.tool_call_json import CallArguments, CallNews
from edgepipe.gateway.tool_calls import Call
from edgepipe.sampling.grammar import json_rule

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"
_HEAD = re.compile(
    rf"\s*{_CALL}\s*(?:function{_SEP})?([A-Za-z0-9_.-]{{1,64}}?)\s*(?:{_SEP}|{_FENCE}json)\s*(?={{)",
)


def _reader(calls: CallNews, functions: Functions) -> NamedReader:
    return NamedReader(
        calls,
        functions,
        opening=_CALLS,
        head=_HEAD,
        closings=(_FENCE, _CALL_END, _CALLS_END),
        next_call=_CALL,
        arguments=CallArguments,
    )


def _around(
    before: str, between: str, after: str, *, joint: str = ""
) -> tuple[Callable[[Functions, CallForm], list[str]], _Writer]:
    def rules(functions: Functions, form: CallForm) -> list[str]:
        calls = [
            f"call_{index}: {_quoted(_CALL + before + name + between)} {json_rule(schema)} {_quoted(after + _CALL_END)}"
            for index, (name, schema) in enumerate(functions.items())
        ]
        more = f"({_quoted(joint) if joint else ''} call)*" if form.several else ""
        group = f"call {more} {_quoted(_CALLS_END)}"
        calls.insert(0, any_call(len(calls)))
        if form.forced:
            return [f"answer: {_quoted(_CALLS)} {group}", *calls]
        return ["answer: group | PLAIN", f"group: opening {group}", lazy_opening(_CALLS), *calls]

    def write(calls: Sequence[Call]) -> str:
        texts = [_CALL + before + call.name + between + written_json(call.arguments) + after for call in calls]
        return _CALLS + joint.join(text + _CALL_END for text in texts) + _CALLS_END

    return rules, write


_Writer = Callable[[Sequence[Call]], str]
_MARKS = (_CALLS, _CALLS_END, _CALL, _SEP, _CALL_END)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_v3_rules, _v3_write = _around(f"function{_SEP}", f"\n{_FENCE}json\n", f"\n{_FENCE}", joint="\n")
_v31_rules, _v31_write = _around("", _SEP, "")

DEEPSEEK_V3 = ChatFormat(name="deepseek-v3", marks=_MARKS, new_reader=_reader, call_rules=_v3_rules, write=_v3_write)
"""A type, a name, and arguments in a fenced block."""

DEEPSEEK_V31 = ChatFormat(
    name="deepseek-v3.1", marks=_MARKS, new_reader=_reader, call_rules=_v31_rules, write=_v31_write
)
"""A name and arguments."""


def _dsml(name: str, calls: str, *, no_arguments: str = "") -> ChatFormat:
    """Make the format of V3.2 and later; ``calls``: name of the tag around a group. ``no_arguments``: see Tags."""
    tags = Tags(
        opening=f"<｜DSML｜{calls}>",
        closing=f"</｜DSML｜{calls}>",
        call='<｜DSML｜invoke name="NAME">',
        call_end="</｜DSML｜invoke>",
        argument='<｜DSML｜parameter name="NAME" string="KIND">',
        argument_end="</｜DSML｜parameter>",
        call_reading=re.compile(r'\s*<｜DSML｜invoke name="([^<>"\n]{1,64})">'),
        argument_reading=re.compile(r'<｜DSML｜parameter name="([^<>"\n]*)"(?: string="(true|false)")?>'),
        before_call="\n",
        before_argument="\n",
        before_call_end="\n",
        before_closing="\n",
        no_arguments=no_arguments,
        tokens=("｜DSML｜",),
    )
    return tagged_format(name, tags)


DEEPSEEK_V32 = _dsml("deepseek-v3.2", "function_calls")
"""Tags with names and texts; an attribute tells strings from JSON."""

DEEPSEEK_V4 = _dsml("deepseek-v4", "tool_calls", no_arguments="\n")
"""As V3.2, in a tag of another name."""
