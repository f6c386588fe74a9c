"""DeepSeek's calls. Sources: the chat templates of DeepSeek-V3-0324, V3.1, V3.2 and V4."""

from __future__ import annotations

import re
from dataclasses import replace

from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.sections import Section, section_format
from edgepipe.gateway.formats.tagged import Tags, tagged_format

_CALL, _SEP, _FENCE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```"
_V31 = Section(
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    call=_CALL,
    call_end="<｜tool▁call▁end｜>",
    between=_SEP,
    head=re.compile(
        rf"\s*{_CALL}\s*(?:function{_SEP})?([A-Za-z0-9_.-]{{1,64}}?)\s*(?:{_SEP}|{_FENCE}json)\s*(?={{)",
    ),
    also_ends=(_FENCE,),
    more_marks=(_SEP,),
)
_V3 = replace(_V31, before=f"function{_SEP}", between=f"\n{_FENCE}json\n", after=f"\n{_FENCE}", joint="\n")

DEEPSEEK_V3 = section_format("deepseek-v3", _V3)
"""A type, a name, and arguments in a fenced block."""

DEEPSEEK_V31 = section_format("deepseek-v3.1", _V31)
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
"""V4 differs from V3.2 in the name of the outer tag."""
