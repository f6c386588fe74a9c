"""The calls of Qwen3-Coder, of later Qwen models (Qwen3.5, 3.6) and of Nemotron 3.

Sources: the chat templates of Qwen3-Coder-30B-A3B-Instruct, Qwen3.5-35B-A3B and Nemotron-3-Nano-30B-A3B.
"""

from __future__ import annotations

import re

from edgepipe.gateway.formats.tagged import Tags, tagged_format

QWEN_CODER = tagged_format(
    "qwen-coder",
    Tags(
        opening="<tool_call>",
        closing="</tool_call>",
        call="<function=NAME>",
        call_end="</function>",
        argument="<parameter=NAME>",
        argument_end="</parameter>",
        call_reading=re.compile(r"\s*<function=([^<>\n]{1,64})>"),
        argument_reading=re.compile(r"<parameter=([^<>\n]*)>"),
        one_call=True,
        may_lack_opening=True,  # Qwen3-Coder often leaves out <tool_call>
        before_call="\n",
        before_argument="\n",
        around_text="\n",
        before_call_end="\n",
        before_closing="\n",
    ),
)
"""``<tool_call>``, ``<function=name>``, ``<parameter=key>`` with its text on lines of its own, and their ends."""
