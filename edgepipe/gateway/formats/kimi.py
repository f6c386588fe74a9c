"""The calls of Kimi K2. Sources: the chat templates of Kimi-K2-Instruct and Kimi-K2-Thinking."""

from __future__ import annotations

import re

from edgepipe.gateway.formats.sections import Section, section_format

_CALL, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"

KIMI = section_format(
    "kimi",
    Section(
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        call=_CALL,
        call_end="<|tool_call_end|>",
        before="functions.",
        number=":",
        between=_ARGUMENTS,
        head=re.compile(
            rf"\s*{re.escape(_CALL)}\s*(?:functions\.)?([A-Za-z0-9_.-]{{1,64}}?)(?::[0-9]{{1,6}})?\s*"
            rf"{re.escape(_ARGUMENTS)}\s*(?={{)",
        ),
        lacks_opening=True,
        more_marks=(_ARGUMENTS,),
    ),
)
"""``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section."""
