"""Choose a model's format from its chat template's text."""

from __future__ import annotations

import re
from dataclasses import replace

from edgepipe.gateway.formats.chat_format import ChatFormat, Reasoning
from edgepipe.gateway.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32
from edgepipe.gateway.formats.gemma import GEMMA4
from edgepipe.gateway.formats.glm import GLM
from edgepipe.gateway.formats.harmony import HARMONY
from edgepipe.gateway.formats.hermes import HERMES
from edgepipe.gateway.formats.listed import GRANITE, PHI
from edgepipe.gateway.formats.llama import LLAMA
from edgepipe.gateway.formats.minimax import MINIMAX
from edgepipe.gateway.formats.mistral import MISTRAL, MISTRAL_ARGS
from edgepipe.gateway.formats.python_calls import LFM2, OLMO
from edgepipe.gateway.formats.qwen_coder import QWEN_CODER

FORMATS = (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    GRANITE,
    PHI,
    HARMONY,
    GLM,
    QWEN_CODER,
    MINIMAX,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GEMMA4,
    LFM2,
    OLMO,
)

_SIGNS: tuple[tuple[ChatFormat, str], ...] = (
    (HARMONY, r"<\|channel\|>(?s:.*)<\|message\|>|<\|message\|>(?s:.*)<\|channel\|>"),
    (GEMMA4, r"<\|tool_call>"),
    (GEMMA4, r"<\|turn>"),
    (LFM2, r"<\|tool_(?:call|list)_start\|>|keep_past_thinking(?s:.*)List of tools: "),
    (MINIMAX, r"<minimax:tool_call>"),
    (DEEPSEEK_V32, r"DSML"),
    (DEEPSEEK_V3, r"tool▁sep｜>(?s:.{0,200})```json"),
    (DEEPSEEK_V31, r"tool▁calls▁begin"),
    (GLM, r"<arg_key>"),
    (OLMO, r"<function_calls>"),
    (QWEN_CODER, r"<function="),
    (MISTRAL_ARGS, r"\[TOOL_CALLS\](?s:.*)\[ARGS\]|\[ARGS\](?s:.*)\[TOOL_CALLS\]"),
    (MISTRAL, r"\[TOOL_CALLS\]"),
    (PHI, r"<\|/tool_call\|>|<\|/tool\|>"),
    (GRANITE, r"<\|tool_call\|>"),
    (HERMES, r"<tool_call>"),
    (LLAMA, r'<\|python_tag\|>|"parameters"'),
)
"""Formats and the pattern in the template that shows them; the first that is found decides."""

_THINKING = (
    (Reasoning("[THINK]", "[/THINK]"), r"\[THINK\]"),
    (Reasoning("<think>", "</think>"), r"</?think>"),
)


def detect_format(template: str) -> ChatFormat:
    """Return the format that a chat template mentions, else Hermes': it is the most common, and easy to explain."""
    found = next((known for known, sign in _SIGNS if re.search(sign, template)), HERMES)
    if found.has_channels or found.reasoning is not None:
        return found
    return replace(found, reasoning=next((marks for marks, sign in _THINKING if re.search(sign, template)), None))
