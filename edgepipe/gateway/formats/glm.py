"""The calls of GLM-4.5, 4.6 and 4.7. Source: the chat templates of these models."""

from __future__ import annotations

import re

from edgepipe.gateway.formats.tagged import Tags, tagged_format

GLM = tagged_format(
    "glm",
    Tags(
        opening="<tool_call>",
        closing="</tool_call>",
        call="NAME",
        call_end="",
        argument="<arg_key>NAME</arg_key>\n<arg_value>",
        argument_end="</arg_value>",
        call_reading=re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?=\s*<(?:arg_key|/tool_call)>)"),
        argument_reading=re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
        before_argument="\n",
        before_closing="\n",
    ),
)
"""``<tool_call>name``, ``<arg_key>key</arg_key>``, ``<arg_value>value</arg_value>``, ``</tool_call>``."""
