"""Fields of other servers' APIs that edgepipe does not use.

The gateway refuses a field that would change the answer, unless its value has no effect. Other fields have no effect;
``docs/reference.md`` lists them. The gateway ignores unknown fields, as OpenAI's clients expect, but refuses those that
are misspelt (``misspelt``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused field."""

    unless: tuple[Any, ...] = ()  # values without effect, besides None
    instead: str = ""  # field or value to send instead

    def takes(self, value: object) -> bool:
        """Return whether the value has no effect. True and 1 differ."""
        known = (None, *self.unless)
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known)

    def message(self, name: str) -> str:
        """Build the message: the field is refused; what to send instead."""
        return f"'{name}' is not supported" + (f"; send {self.instead}" if self.instead else "")


RefusedFields = Mapping[str, Refused]

_ONE = (1, 1.0)
_ZERO = (0, 0.0)

SAMPLING: RefusedFields = {
    "typical_p": Refused(_ONE),
    "tfs_z": Refused(_ONE),
    "mirostat": Refused((0,)),
    "repeat_last_n": Refused((-1, 64), "repetition_penalty, which counts the whole text"),
    "penalize_newline": Refused((True,)),
}
"""Sampling fields of llama.cpp, and of Ollama's options."""

_CHAT_ONLY = "a conversation to /v1/chat/completions"

GENERATION: RefusedFields = {
    **SAMPLING,
    # other names of OpenAI's fields: Anthropic, Ollama, Transformers, the Responses API
    "do_sample": Refused((True,), "temperature: 0"),
    "format": Refused(("",), "response_format"),
    "input": Refused((), "messages to /v1/chat/completions, or prompt to /v1/completions"),
    "instructions": Refused(("",), "a turn of the role 'system' in messages"),
    "max_length": Refused((), "max_tokens"),
    "max_new_tokens": Refused((), "max_tokens"),
    "max_output_tokens": Refused((), "max_tokens"),
    "num_predict": Refused((), "max_tokens"),
    "options": Refused(({},), "its fields beside messages, such as temperature and max_tokens"),
    "raw": Refused((False,), "a prompt to /v1/completions"),
    "stop_sequences": Refused(([],), "stop"),
    "system": Refused(("",), "a turn of the role 'system' in messages"),
    # vLLM
    "allowed_token_ids": Refused(([],), "logit_bias"),
    "bad_words": Refused(([],), "logit_bias"),
    "cache_salt": Refused(),
    "early_stopping": Refused((False,)),
    "guided_grammar": Refused((), "guided_json, guided_regex or guided_choice"),
    "guided_whitespace_pattern": Refused(),
    "include_stop_str_in_output": Refused((False,)),
    "kv_transfer_params": Refused(({},)),
    "length_penalty": Refused(_ONE),
    "logits_processors": Refused(([],)),
    "prompt_logprobs": Refused((False, 0), "echo and logprobs to /v1/completions"),
    "return_tokens_as_token_ids": Refused((False,), "return_token_ids"),
    "skip_special_tokens": Refused((True,)),
    "structural_tag": Refused(),
    "truncate_prompt_tokens": Refused(),
    "use_beam_search": Refused((False,)),
    "vllm_xargs": Refused(({},)),
    # llama.cpp and SGLang
    "custom_logit_processor": Refused(),
    "dry_multiplier": Refused(_ZERO),
    "dynatemp_range": Refused(_ZERO),
    "ebnf": Refused((), "guided_regex or guided_json"),
    "grammar": Refused(("",), "guided_regex or guided_json"),
    "lora": Refused(([],)),
    "lora_path": Refused(),
    "min_keep": Refused((0,)),
    "n_cmpl": Refused((1,), "n"),
    "n_indent": Refused((0,)),
    "n_predict": Refused((-1,), "max_tokens"),
    "n_probs": Refused((0,), "logprobs"),
    "no_stop_trim": Refused((False,)),
    "post_sampling_probs": Refused((False,)),
    "regex": Refused((), "guided_regex"),
    "repeat_penalty": Refused(_ONE, "repetition_penalty"),
    "response_fields": Refused(([],)),
    "return_hidden_states": Refused((False,)),
    "return_tokens": Refused((False,), "return_token_ids"),
    "samplers": Refused(([],)),
    "session_params": Refused(),
    "stop_regex": Refused(([], ""), "stop"),
    "t_max_predict_ms": Refused((0, -1)),
    "top_n_sigma": Refused((-1, -1.0)),
    "xtc_probability": Refused(_ZERO),
}
"""Fields of both of OpenAI's endpoints."""

CONVERSATION: RefusedFields = {
    "add_generation_prompt": Refused((True,)),
    "add_special_tokens": Refused((False,)),
    "chat_template": Refused(),  # only models bring templates
    "continue_final_message": Refused((False,)),
    "documents": Refused(([],)),
    "mm_processor_kwargs": Refused(({},)),
}
"""Fields that turn a conversation into a prompt."""

CHAT: RefusedFields = {
    **GENERATION,
    **CONVERSATION,
    # OpenAI
    "audio": Refused(),
    "function_call": Refused(("auto",), "tool_choice"),
    "functions": Refused(([],), "tools"),
    "modalities": Refused((["text"],)),
    "moderation": Refused(),
    "verbosity": Refused(("low", "medium", "high")),
    "web_search_options": Refused(),
    # vLLM, llama.cpp and others
    "echo": Refused((False,)),
    "include_reasoning": Refused((True,)),
    "parse_tool_calls": Refused((True,)),
    "prompt": Refused((), "messages"),
    "reasoning_format": Refused(("auto", "deepseek")),
    "suffix": Refused(("",)),
    "max_thinking_tokens": Refused((), "thinking_token_budget"),
    "think": Refused((), "enable_thinking"),
    "thinking_forced_open": Refused((False,)),
}

COMPLETION: RefusedFields = {
    **GENERATION,
    "chat_template_kwargs": Refused(({},), _CHAT_ONLY),
    "enable_thinking": Refused((), _CHAT_ONLY),
    "messages": Refused((), _CHAT_ONLY),
    "reasoning": Refused((), _CHAT_ONLY),
    "reasoning_effort": Refused((), _CHAT_ONLY),
    "think": Refused((), _CHAT_ONLY),
    "thinking": Refused((), _CHAT_ONLY),
    "thinking_budget": Refused((), _CHAT_ONLY),
    "thinking_token_budget": Refused((), _CHAT_ONLY),
    "prompt_embeds": Refused(),
    "suffix": Refused(("",)),
    "tool_choice": Refused(("none", "auto")),
    "tools": Refused(([],), "them to /v1/chat/completions"),
}

MESSAGE: RefusedFields = {
    "audio": Refused(),
    "images": Refused(([],)),  # Ollama's name; models here read text only
    "prefix": Refused((False,)),  # the start of an answer, written by the client
}

REASONING: RefusedFields = {"exclude": Refused((False,))}
"""Fields of ``reasoning``."""

RESPONSES: RefusedFields = {
    "background": Refused((False,)),
    "context_management": Refused(([],)),
    "access_programs": Refused(),
    "conversation": Refused((), "previous_response_id"),
    "messages": Refused((), "input"),
    "moderation": Refused(),
    "max_tokens": Refused((), "max_output_tokens"),
    "max_completion_tokens": Refused((), "max_output_tokens"),
    "n": Refused(_ONE),
    "prompt": Refused((), "instructions and input"),
    "response_format": Refused((), "text.format"),
    "stop": Refused(([], "")),
    "stream_options": Refused(({}, {"include_obfuscation": False}, {"include_obfuscation": True})),
    "top_logprobs": Refused(_ZERO, "logprobs to /v1/chat/completions"),
    "truncation": Refused(("disabled",)),
}
"""Fields of the Responses API."""

OLLAMA: RefusedFields = {
    "context": Refused(([],), "messages to /api/chat"),
    "suffix": Refused(("",)),
    "template": Refused(("",)),
}

ANTHROPIC: RefusedFields = {
    "container": Refused(),
    "max_completion_tokens": Refused((), "max_tokens"),
    "mcp_servers": Refused(([],)),
    "output_format": Refused((), "output_config.format"),
    "prompt": Refused((), "messages"),
    "reasoning_effort": Refused((), "output_config.effort"),
    "response_format": Refused((), "output_config.format"),
    "stop": Refused(([], ""), "stop_sequences"),
}

TOKENIZE: RefusedFields = {name: refused for name, refused in CONVERSATION.items() if name != "add_special_tokens"}

NO_EFFECT: Mapping[str, str] = {
    "background_options": "in /v1/responses: only with background, which is refused",
    "cache_control": "the prefix cache is always on",
    "cache_prompt": "the prefix cache is always on",
    "context_management": "edgepipe refuses a prompt that is too long and never cuts it",
    "diagnostics": "answers have no diagnostics",
    "client_metadata": "edgepipe sends no reports about users",
    "disable_fallback": "in structured_outputs",
    "dry_allowed_length": "only with dry_multiplier, which is refused",
    "dry_base": "only with dry_multiplier, which is refused",
    "dry_penalty_last_n": "only with dry_multiplier, which is refused",
    "dry_sequence_breakers": "only with dry_multiplier, which is refused",
    "dynatemp_exponent": "only with dynatemp_range, which is refused",
    "guided_decoding_backend": "edgepipe has one backend",
    "id_slot": "the engine assigns slots",
    "image": "in /v1/responses: models here read text only",
    "include": "in /v1/responses: answers have the reasoning itself",
    "include_obfuscation": "in stream_options: edgepipe pads no events",
    "inference_geo": "requests stay in the cluster",
    "max_tool_calls": "in /v1/responses: the gateway calls no tools itself",
    "metadata": "edgepipe stores no chat completions; a response returns it",
    "mirostat_eta": "only with mirostat, which is refused",
    "mirostat_tau": "only with mirostat, which is refused",
    "n_keep": "edgepipe refuses a prompt that is too long and never cuts it",
    "num_keep": "edgepipe refuses a prompt that is too long and never cuts it",
    "prediction": "it would change the speed only",
    "priority": "service_tier sets the order of requests",
    "prompt_cache_key": "the prefix cache is always on",
    "prompt_cache_options": "the prefix cache is always on",
    "prompt_cache_retention": "the prefix cache is always on",
    "request_id": "the header X-Request-Id names a request",
    "return_progress": "edgepipe sends no progress",
    "safety_identifier": "edgepipe sends no reports about users",
    "service_tier": "in /v1/messages: the header X-Edgepipe-Priority sets the order of requests",
    "shift": "edgepipe refuses a prompt that is too long and never cuts it",
    "speed": "the model has one speed",
    "spaces_between_special_tokens": "answers contain no special tokens",
    "summary": "in reasoning: answers have the reasoning itself",
    "store": "edgepipe stores no chat completions",
    "strict": "in json_schema: schemas always bind answers",
    "timings_per_token": "/metrics has times",
    "toolset_name": "in blocks of /v1/messages: tools have no sets",
    "truncate": "edgepipe refuses a prompt that is too long and never cuts it",
    "user_profile_id": "edgepipe sends no reports about users",
    "user": "edgepipe sends no reports about users",
    "verbose": "/api/show always sends everything",
    "workspace_id": "edgepipe has no workspaces",
    "xtc_threshold": "only with xtc_probability, which is refused",
    **dict.fromkeys(
        (
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
            "num_ctx",
            "num_gpu",
            "num_thread",
            "numa",
            "use_mlock",
            "use_mmap",
            "vocab_only",
        ),
        "in Ollama's options: the cluster decides how to load a model",
    ),
}
"""Fields without effect, and the reasons."""
