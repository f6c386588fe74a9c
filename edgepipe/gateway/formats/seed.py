"""The calls of Seed-OSS. Source: the chat template of Seed-OSS-36B-Instruct."""

from __future__ import annotations

import re
from dataclasses import replace

from edgepipe.gateway.formats.chat_format import Reasoning
from edgepipe.gateway.formats.tagged import Tags, tagged_format

SEED = replace(
    tagged_format(
        "seed",
        Tags(
            opening="<seed:tool_call>",
            closing="</seed:tool_call>",
            call="<function=NAME>",
            call_end="</function>",
            argument="<parameter=NAME>",
            argument_end="</parameter>",
            call_reading=re.compile(r"\s*<function=([^<>\n]{1,64})>"),
            argument_reading=re.compile(r"<parameter=([^<>\n]*)>"),
            one_call=True,
            may_lack_opening=True,
            before_call="\n",
            before_argument="\n",
            before_call_end="\n",
            before_closing="\n",
        ),
    ),
    reasoning=Reasoning("<seed:think>", "</seed:think>"),
)
"""``<seed:tool_call>``, ``<function=name>``, ``<parameter=key>text</parameter>``, and their ends."""
