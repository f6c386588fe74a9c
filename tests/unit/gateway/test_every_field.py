"""Every field of every request is used, refused by name, or listed in the docs as taken without effect: those that our
own bodies define, and those that clients of OpenAI, vLLM, SGLang, llama.cpp and Ollama send."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.other_fields import NO_EFFECT
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.anthropic.body import CountBody, MessagesBody
from edgepipe.gateway.protocols.ollama.body import OllamaChatBody, OllamaGenerateBody, OllamaMessage, Options, ShowBody
from edgepipe.gateway.protocols.responses.body import ResponsesBody
from edgepipe.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, Message, StreamOptions, TokenizeBody
from edgepipe.gateway.strict_body import StrictBody, validate
from tests.support.gateways.fake_engine import END, ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving
from tests.support.gateways.template_traits import TURNS, traits_of

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
OTHER = {"type": "function", "function": {"name": "hear"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {}}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}

SHARED: dict[str, Any] = {
    "model": "other",
    "stream": True,
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "max_tokens": 3,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "repetition_penalty": 2,
    "logit_bias": {"7": 1},
    "seed": 5,
    "stop": "Paris",
    "stop_token_ids": [9],
    "ignore_eos": True,
    "return_token_ids": True,
    "n": 2,
    "best_of": 2,
    "service_tier": "flex",
    "response_format": FORMAT,
    "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA,
    "guided_choice": ["a", "b"],
    "guided_regex": "a",
    "json_schema": SCHEMA,
}
CHAT = SHARED | {
    "messages": [{"role": "user", "content": "ho"}],
    "max_completion_tokens": 3,
    "logprobs": True,
    "top_logprobs": ({"logprobs": True}, 2),
    "tools": [TOOL],
    "tool_choice": ({"tools": [TOOL]}, "required"),
    "parallel_tool_calls": ({"tools": [TOOL]}, False),
    "reasoning_effort": "low",
    "enable_thinking": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "thinking": {"type": "disabled"},
    "reasoning": {"effort": "low"},
    "thinking_token_budget": 5,
    "thinking_budget": 5,
}
COMPLETION = SHARED | {"prompt": "ho", "echo": True, "logprobs": 2, "add_special_tokens": False}
GENERATE: dict[str, Any] = {
    "model": "other",
    "stream": False,
    "format": "json",
    "options": {"seed": 9},
    "logprobs": True,
    "top_logprobs": 2,
    "think": True,
    "prompt": "ho",
    "system": "be brief",
    "raw": True,
    "images": ["aGk="],
    "keep_alive": ({"prompt": ""}, 0),
}
OPTIONS: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "seed": 5,
    "stop": ["Paris"],
    "num_predict": 3,
    "repeat_penalty": 2,
    "presence_penalty": 1,
    "frequency_penalty": 1,
}
"""A value of each field that is used, or what goes with it and the value."""

VLLM = """
best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output
ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs
allowed_token_ids bad_words echo add_special_tokens structured_outputs guided_json guided_regex guided_choice
guided_grammar structural_tag thinking_token_budget guided_decoding_backend guided_whitespace_pattern priority
request_id logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
""".split()
VLLM_CHAT = """
include_reasoning add_generation_prompt continue_final_message documents chat_template mm_processor_kwargs
""".split()
LLAMA_CPP = """
temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl stream stop
typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base
dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau
mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot
cache_prompt return_tokens samplers timings_per_token return_progress post_sampling_probs response_fields lora
top_n_sigma
""".split()
SGLANG = """
top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
skip_special_tokens lora_path session_params custom_logit_processor return_hidden_states
""".split()
LLAMA_CPP_CHAT = """
reasoning_format thinking_forced_open parse_tool_calls chat_template_kwargs enable_thinking
""".split()
MESSAGE = """
role content name audio refusal function_call tool_calls tool_call_id reasoning reasoning_content thinking prefix
""".split()
OLLAMA = """
model prompt suffix system template context stream raw format keep_alive images options think truncate shift
logprobs top_logprobs
""".split()
OLLAMA_CHAT = """
model messages tools stream format keep_alive options think truncate shift logprobs top_logprobs
""".split()
OLLAMA_OPTIONS = """
numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock num_thread
num_keep seed num_predict top_k top_p min_p tfs_z typical_p repeat_last_n temperature repeat_penalty
presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline stop
""".split()
OPENAI_CHAT = [*chat_create_params.CompletionCreateParamsBase.__annotations__, "stream"]
OPENAI_TEXT = [*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"]

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
COUNTED: dict[str, Any] = {
    "model": "other",
    "messages": [{"role": "user", "content": "hoho"}],
    "system": "Be brief.",
    "tools": [LOOK],
    "tool_choice": ({"tools": [LOOK]}, {"type": "any"}),
    "thinking": {"type": "disabled"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}
PLACES: dict[str, tuple[str, dict[str, Any], type[StrictBody], Mapping[str, Any], Sequence[str]]] = {
    "chat": (
        CHAT_PATH,
        {"messages": USER},
        ChatBody,
        CHAT,
        [*OPENAI_CHAT, *VLLM, *VLLM_CHAT, *LLAMA_CPP, *LLAMA_CPP_CHAT, *SGLANG, "prompt", "suffix"],
    ),
    "completion": (
        TEXT_PATH,
        {"prompt": "hi"},
        CompletionBody,
        COMPLETION,
        [*OPENAI_TEXT, *VLLM, *LLAMA_CPP, *SGLANG, "prompt_embeds", "messages", "tools", "tool_choice"],
    ),
    "stream_options": (
        CHAT_PATH,
        {"messages": USER, "stream": True, "stream_options": {}},
        StreamOptions,
        {"include_usage": True, "continuous_usage_stats": ({"include_usage": True}, True)},
        ["include_usage", "continuous_usage_stats", "include_obfuscation"],
    ),
    "messages.0": (
        CHAT_PATH,
        {"messages": USER},
        Message,
        {
            "role": "system",
            "content": "ho",
            "name": "Ann",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "thinking": "hm",
            "refusal": ({"role": "assistant", "content": None}, "no"),
            "tool_calls": [CALL],
            "tool_call_id": "1",
            "function_call": CALL["function"],
        },
        MESSAGE,
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 9},
        MessagesBody,
        COUNTED
        | {
            "max_tokens": 3,
            "stream": True,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "stop_sequences": ["Paris"],
        },
        [name for name in message_create_params.MessageCreateParamsStreaming.__annotations__ if name != "betas"],
    ),
    "anthropic count": (
        "/v1/messages/count_tokens",
        {"messages": USER},
        CountBody,
        {name: probe for name, probe in COUNTED.items() if name not in ("tool_choice", "output_config")}
        | {"tool_choice": ({"tools": [LOOK]}, {"type": "none"}), "output_config": {"effort": "low"}},
        [*message_count_tokens_params.MessageCountTokensParams.__annotations__],
    ),
    "ollama chat": (
        "/api/chat",
        {"model": "tiny", "messages": USER},
        OllamaChatBody,
        {name: value for name, value in GENERATE.items() if name in OllamaChatBody.model_fields}
        | {"messages": [{"role": "user", "content": "ho"}], "tools": [TOOL], "keep_alive": ({"messages": []}, 0)},
        OLLAMA_CHAT,
    ),
    "ollama generate": (
        "/api/generate",
        {"model": "tiny", "prompt": "hi"},
        OllamaGenerateBody,
        GENERATE,
        OLLAMA,
    ),
    "options": ("/api/chat", {"model": "tiny", "messages": USER, "options": {}}, Options, OPTIONS, OLLAMA_OPTIONS),
    "ollama messages.0": (
        "/api/chat",
        {"model": "tiny", "messages": USER},
        OllamaMessage,
        {
            "role": "system",
            "content": "ho",
            "images": ["aGk="],
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
            "tool_name": "look",
            "tool_call_id": "1",
        },
        "role content thinking images tool_calls tool_name tool_call_id".split(),
    ),
    "show": (
        "/api/show",
        {"model": "tiny"},
        ShowBody,
        {"model": "other", "name": ({"model": None}, "other")},
        ["verbose"],
    ),
    "tokenize": (
        "/tokenize",
        {"messages": USER},
        TokenizeBody,
        {
            "model": "other",
            "prompt": ({"messages": None}, "ho"),
            "messages": [{"role": "user", "content": "ho"}],
            "add_special_tokens": True,
            "return_token_strs": True,
            "tools": [TOOL],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        ["add_generation_prompt", "continue_final_message", "chat_template", "mm_processor_kwargs"],
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi"},
        ResponsesBody,
        {
            "model": "other",
            "input": "ho",
            "instructions": "be brief",
            "previous_response_id": "resp_0",
            "store": False,
            "stream": True,
            "max_output_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.5,
            "tools": [TOOL["function"] | {"type": "function"}],
            "tool_choice": ({"tools": [TOOL["function"] | {"type": "function"}]}, "required"),
            "parallel_tool_calls": ({"tools": [TOOL["function"] | {"type": "function"}]}, False),
            "text": {"format": {"type": "json_object"}},
            "reasoning": {"effort": "low"},
            "service_tier": "flex",
            "metadata": {"a": "b"},
            "user": "me",
        },
        list(response_create_params.ResponseCreateParamsBase.__annotations__),
    ),
    "detokenize": ("/detokenize", {"tokens": [65]}, DetokenizeBody, {"model": "other", "tokens": [66]}, []),
}
DOCS = (Path(__file__).resolve().parents[3] / "docs" / "reference.md").read_text(encoding="utf-8")


class TellingAssets(ByteAssets):
    """Shows all that a template is given, and special tokens; its model reasons."""

    traits = traits_of("<think></think>" + TURNS)
    chat = detect_format("<think></think>")

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return [*super().encode(text, special_tokens=False), *([END] if special_tokens else [])]

    async def render(self, messages: Sequence[Mapping[str, Any]], *, owner: str = "", **keywords: Any) -> str:
        return f"{messages} {keywords}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Served]:
    """A gateway whose engine answers in one piece."""
    async with serving(FakeEngine(answer=b"Paris.", group=64), load=lambda path: TellingAssets()) as value:
        yield value


async def _seen(served: Served, path: str, body: Mapping[str, Any]) -> tuple[str, list[str], int]:
    """What comes back and what the engine is sent, without names that differ each time; and the status."""
    served.engine.submits.clear()
    response = await served.http.post(path, json=body)
    for submit in served.engine.submits:
        submit.ClearField("request_id")
    text = re.sub(r"(chatcmpl|cmpl|call|resp|msg)[-_][0-9a-f_]+", "ID", response.text)
    return text, [str(submit) for submit in served.engine.submits], response.status_code


def _with(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The place's least body with these fields in it, where the place is a part of the body there."""
    body = PLACES[place][1]
    if "messages.0" in place:
        return body | {"messages": [body["messages"][0] | fields]}
    return body | ({place: fields} if place in body else fields)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("place", PLACES)
async def test_every_field_of_our_bodies_is_used_or_listed(gateway: Served, place: str) -> None:
    path, _, body, probes, _ = PLACES[place]
    assert set(body.model_fields) <= probes.keys() | NO_EFFECT.keys()
    plain = await _seen(gateway, path, _with(place, {}))
    for name, probe in probes.items():
        beside: dict[str, Any] = probe[0] if isinstance(probe, tuple) else {}
        value = probe[1] if isinstance(probe, tuple) else probe
        without = await _seen(gateway, path, _with(place, beside)) if beside else plain
        with_it = await _seen(gateway, path, _with(place, beside | {name: value}))
        assert with_it[:2] != without[:2], f"{name} changes nothing"
        assert with_it[2] < 500
        if with_it[2] == 400:
            assert name in with_it[0], f"{name} is not named: {with_it[0]}"


@pytest.mark.parametrize("place", PLACES)
def test_every_field_that_clients_send_is_used_refused_or_listed(place: str) -> None:
    _, _, body, _, sent = PLACES[place]
    assert set(sent) <= {*body.model_fields, *body.refused, *NO_EFFECT}
    assert not {*body.model_fields} & {*body.refused}
    for name in body.refused:
        with pytest.raises(HttpProblem) as caught:
            validate(body, {name: "x"})
        assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("place", PLACES)
async def test_a_refused_field_reaches_the_client_and_the_others_change_nothing(gateway: Served, place: str) -> None:
    path, _, body, _, sent = PLACES[place]
    plain = await _seen(gateway, path, _with(place, {}))
    idle: dict[str, Any] = dict.fromkeys({*sent, *NO_EFFECT} - body.model_fields.keys() - body.refused.keys(), "x")
    for index in range(3):
        neutral = {name: [None, *field.unless][index : index + 1] for name, field in body.refused.items()}
        fields = idle | {name: values[0] for name, values in neutral.items() if values}
        assert await _seen(gateway, path, _with(place, fields)) == plain, fields
    for name in [*body.refused][:1]:
        text, submits, status = await _seen(gateway, path, _with(place, {name: "x"}))
        assert (status, submits) == (400, [])
        assert f"'{name}' is not supported" in text


def test_the_docs_list_what_has_no_effect_and_what_is_refused() -> None:
    refused = [name for _, _, body, _, _ in PLACES.values() for name in body.refused]
    for name in (*NO_EFFECT, *refused):
        assert f"| `{name}` |" in DOCS, name
