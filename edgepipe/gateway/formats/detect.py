"""Choose a model's format from its chat template's text."""

from __future__ import annotations

import re
from dataclasses import replace

from edgepipe.gateway.formats.chat_format import ChatFormat, Reasoning
from edgepipe.gateway.formats.cohere import COHERE
from edgepipe.gateway.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32
from edgepipe.gateway.formats.gemma import GEMMA4
from edgepipe.gateway.formats.glm import GLM
from edgepipe.gateway.formats.harmony import HARMONY
from edgepipe.gateway.formats.hermes import HERMES
from edgepipe.gateway.formats.kimi import KIMI
from edgepipe.gateway.formats.listed import GRANITE, NEMOTRON_2, PHI
from edgepipe.gateway.formats.llama import LLAMA
from edgepipe.gateway.formats.minimax import MINIMAX
from edgepipe.gateway.formats.mistral import MISTRAL, MISTRAL_ARGS
from edgepipe.gateway.formats.python_calls import LFM2, OLMO
from edgepipe.gateway.formats.qwen_coder import QWEN_CODER
from edgepipe.gateway.formats.seed import SEED

FORMATS = (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    GRANITE,
    PHI,
    NEMOTRON_2,
    COHERE,
    HARMONY,
    GLM,
    QWEN_CODER,
    MINIMAX,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    KIMI,
    SEED,
    GEMMA4,
    LFM2,
    OLMO,
)


def _both(one: str, other: str) -> str:
    """Return the pattern of a text with both, in any order. It takes linear time for any text."""
    return rf"\A(?=(?s:.*){one})(?=(?s:.*){other})"


_SIGNS: tuple[tuple[ChatFormat, str], ...] = (
    (HARMONY, _both(r"<\|channel\|>", r"<\|message\|>")),
    (COHERE, r"<\|START_ACTION\|>"),
    (GEMMA4, r"<\|tool_call>"),
    (GEMMA4, r"<\|turn>"),
    (LFM2, r"<\|tool_(?:call|list)_start\|>|" + _both("keep_past_thinking", "List of tools: ")),
    (MINIMAX, r"<minimax:tool_call>"),
    (KIMI, r"<\|tool_calls_section_begin\|>"),
    (SEED, r"<seed:tool_call>"),
    (DEEPSEEK_V4, _both("DSML", r"[^_]tool_calls>")),
    (DEEPSEEK_V32, r"DSML"),
    (DEEPSEEK_V3, r"tool▁sep｜>(?s:.{0,200})```json"),
    (DEEPSEEK_V31, r"tool▁calls▁begin"),
    (GLM, r"<arg_key>"),
    (OLMO, r"<function_calls>"),
    (QWEN_CODER, r"<function="),
    (MISTRAL_ARGS, _both(r"\[TOOL_CALLS\]", r"\[ARGS\]")),
    (MISTRAL, r"\[TOOL_CALLS\]"),
    (PHI, r"<\|/tool_call\|>|<\|/tool\|>"),
    (GRANITE, r"<\|tool_call\|>"),
    (NEMOTRON_2, r"<TOOLCALL>"),
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
