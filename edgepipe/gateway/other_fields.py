"""Fields of other servers' APIs that edgepipe does not use.

A field that would bind the answer is refused by name, unless its value changes nothing. The rest have no effect, and
``docs/reference.md`` lists them. Fields that nobody is known to send are ignored, as OpenAI's clients expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused."""

    unless: tuple[Any, ...] = ()  # values that change nothing; None always does
    instead: str = ""  # what to send

    def takes(self, value: object) -> bool:
        """Whether the value changes nothing. A flag is no number."""
        known = (None, *self.unless)
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known)

    def message(self, name: str) -> str:
        """Say that the field is refused, and what to send."""
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
"""How to sample: fields of llama.cpp, and of Ollama's options."""

GENERATION: RefusedFields = {
    **SAMPLING,
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
    "thinking_token_budget": Refused(),
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
    "chat_template": Refused(),  # templates come from models, never from requests
    "continue_final_message": Refused((False,)),
    "documents": Refused(([],)),
    "mm_processor_kwargs": Refused(({},)),
}
"""How a conversation becomes a prompt."""

CHAT: RefusedFields = {
    **GENERATION,
    **CONVERSATION,
    # OpenAI
    "audio": Refused(),
    "function_call": Refused(("auto",), "tool_choice"),
    "functions": Refused(([],), "tools"),
    "modalities": Refused((["text"],)),
    "moderation": Refused(),
    "verbosity": Refused(("medium",)),
    "web_search_options": Refused(),
    # vLLM, llama.cpp and others
    "echo": Refused((False,)),
    "enable_thinking": Refused((), "chat_template_kwargs"),
    "include_reasoning": Refused((True,)),
    "parse_tool_calls": Refused((True,)),
    "prompt": Refused((), "messages"),
    "reasoning_format": Refused(("none", "auto")),
    "suffix": Refused(("",)),
    "thinking_forced_open": Refused((False,)),
}

COMPLETION: RefusedFields = {
    **GENERATION,
    "messages": Refused((), "a conversation to /v1/chat/completions"),
    "prompt_embeds": Refused(),
    "suffix": Refused(("",)),
    "tool_choice": Refused(("none", "auto")),
    "tools": Refused(([],), "them to /v1/chat/completions"),
}

MESSAGE: RefusedFields = {
    "audio": Refused(),
    "prefix": Refused((False,)),  # an answer that a client has begun
}

OLLAMA: RefusedFields = {
    "context": Refused(([],), "messages to /api/chat"),
    "suffix": Refused(("",)),
    "template": Refused(("",)),
}

TOKENIZE: RefusedFields = {name: refused for name, refused in CONVERSATION.items() if name != "add_special_tokens"}

NO_EFFECT: Mapping[str, str] = {
    "cache_prompt": "what prompts have in common is always computed once",
    "disable_fallback": "part of structured_outputs",
    "dry_allowed_length": "only with dry_multiplier, which is refused",
    "dry_base": "only with dry_multiplier, which is refused",
    "dry_penalty_last_n": "only with dry_multiplier, which is refused",
    "dry_sequence_breakers": "only with dry_multiplier, which is refused",
    "dynatemp_exponent": "only with dynatemp_range, which is refused",
    "guided_decoding_backend": "edgepipe has only one",
    "id_slot": "every request finds a place by itself",
    "include_obfuscation": "part of stream_options: nothing is padded",
    "metadata": "nothing is stored",
    "mirostat_eta": "only with mirostat, which is refused",
    "mirostat_tau": "only with mirostat, which is refused",
    "n_keep": "a prompt that is too long is refused, never cut",
    "num_keep": "a prompt that is too long is refused, never cut",
    "prediction": "it would change nothing but the speed",
    "priority": "service_tier sets the order of requests",
    "prompt_cache_key": "what prompts have in common is always computed once",
    "prompt_cache_options": "what prompts have in common is always computed once",
    "prompt_cache_retention": "what prompts have in common is always computed once",
    "reasoning": "of a turn: reasoning_content is shown to models",
    "refusal": "of a turn: content is shown to models",
    "request_id": "the header X-Request-Id names a request",
    "return_progress": "progress is not sent",
    "safety_identifier": "edgepipe reports to nobody",
    "shift": "a prompt that is too long is refused, never cut",
    "spaces_between_special_tokens": "special tokens are not shown",
    "store": "nothing is stored",
    "strict": "of tools and of json_schema: answers are always bound",
    "timings_per_token": "/metrics has times",
    "truncate": "a prompt that is too long is refused, never cut",
    "user": "edgepipe reports to nobody",
    "verbose": "/api/show always sends everything",
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
        "of Ollama's options: the cluster decides how a model is loaded",
    ),
}
"""Fields that are taken without effect, and why."""
