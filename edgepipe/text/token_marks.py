"""Texts of tokens that mark turns, answers and tool calls."""

CHAT_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "</s>",
)
"""Special tokens that end an answer, in addition to the model's config."""

TURN_MARKS = frozenset(
    (
        *(mark for mark in CHAT_ENDS if mark != "</s>"),  # text of web pages has it
        *("<|im_start|>", "<start_of_turn>", "<|turn>", "[INST]", "[/INST]"),
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    )
)
"""Tokens around turns, which people's text never holds as one token."""

TOOL_MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>"),
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<TOOLCALL>", "</TOOLCALL>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "｜DSML｜"),
    *("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
"""Tokens around tool calls and reasoning, whose text grammars bind even if the model marks them as special."""
