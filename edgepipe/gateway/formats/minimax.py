"""The calls of MiniMax-M2. Source: the model's chat template."""

from __future__ import annotations

import re

from edgepipe.gateway.formats.tagged import Tags, tagged_format

MINIMAX = tagged_format(
    "minimax",
    Tags(
        opening="<minimax:tool_call>",
        closing="</minimax:tool_call>",
        call='<invoke name="NAME">',
        call_end="</invoke>",
        argument='<parameter name="NAME">',
        argument_end="</parameter>",
        call_reading=re.compile(r'\s*<invoke name="?([^<>"\n]{1,64})"?>'),
        argument_reading=re.compile(r'<parameter name="?([^<>"\n]*)"?>'),
        before_call="\n",
        before_argument="\n",
        before_call_end="\n",
        before_closing="\n",
    ),
)
"""``<minimax:tool_call>``, ``<invoke name="...">``, ``<parameter name="...">text</parameter>``, and their ends."""
