"""Fields of all requests, with bounds: OpenAI's, and fields that benchmarks send."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from edgepipe.gateway.content_parts import Content, LongText, with_reasoning
from edgepipe.gateway.other_fields import (
    CHAT,
    COMPLETION,
    GENERATION,
    MESSAGE,
    REASONING,
    TOKENIZE,
    RefusedFields,
)
from edgepipe.gateway.raw_fields import (
    MAX_SCHEMA_CHARS,
    MAX_TOOLS,
    JsonSize,
    RawForm,
    RawFormat,
    RawSchema,
    RawToolChoice,
    RawTools,
)
from edgepipe.gateway.strict_body import StrictBody, WithoutNulls, misfit

MAX_CHOICES = 8
MAX_PROMPTS = 64  # lm-eval sends its batch as one list
MAX_MESSAGES = 2048
MAX_STOPS = 64  # OpenAI takes 4; editors that complete code send some 20
MAX_STOP_CHARS = 256
MAX_TOKEN_ID = (1 << 31) - 1
MAX_TOKENS = (1 << 31) - 1  # the context is a lower bound
MAX_PROMPT_IDS = 1 << 20  # ids of one prompt, which fit one message to an engine
MAX_CONVERSATION_CHARS = 4 << 20  # the limit of templates
MAX_CALLS = 4096  # limit for all earlier turns together
MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 300
MAX_REGEX_CHARS = 16 << 10
_MAX_KEYWORDS_CHARS = 64 << 10


def _stops(value: object) -> object:
    """Convert one stop string or several to a list. Empty ones and null would stop nothing and are left out."""
    stops = [value] if isinstance(value, str) else value
    return (
        [each for each in cast("list[object]", stops) if each not in ("", None)] if isinstance(stops, list) else stops
    )


def _prompts(value: object) -> object:
    """Convert one prompt or several, each text or token ids, to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, token ids, or a list of either")
    items = cast("list[object]", value)
    return [items] if isinstance(items[0], int) else items


def _biases(value: object) -> object:
    """Convert keys to token ids: keys of a JSON object are texts."""
    if not isinstance(value, dict):
        return value
    biases: dict[int, object] = {}
    for key, bias in cast("dict[object, object]", value).items():
        text = str(key)
        if not re.fullmatch(r"[0-9]{1,10}", text):
            raise ValueError(f"its key '{text[:32]}' is no token id")
        if int(text) in biases:
            raise ValueError(f"it has token {int(text)} twice")
        biases[int(text)] = bias
    return biases


def _all_that_fit(value: object) -> object:
    """Convert -1, which LM Studio's and llama.cpp's clients send: as many tokens as the context allows."""
    return MAX_TOKENS if type(value) is int and value == -1 else value


_Positive = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
_FromZero = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TokenLimit = Annotated[_Positive, BeforeValidator(_all_that_fit, json_schema_input_type=_Positive | Literal[-1])]
TokenLimitFromZero = Annotated[
    _FromZero, BeforeValidator(_all_that_fit, json_schema_input_type=_FromZero | Literal[-1])
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS)]
Prompt = LongText | TokenIds
Prompts = Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
Text = Annotated[str, Field(max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
_RawStop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_RawStops = Annotated[list[_RawStop | None], Field(max_length=MAX_STOPS)]
Stops = Annotated[_StopList | None, BeforeValidator(_stops, json_schema_input_type=_RawStop | _RawStops | None)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_BiasMap = Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASED_TOKENS)]
_RawBiasMap = Annotated[dict[Text, Bias], Field(max_length=MAX_BIASED_TOKENS)]
Biases = Annotated[_BiasMap | None, BeforeValidator(_biases, json_schema_input_type=_RawBiasMap | None)]


class StreamOptions(StrictBody):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk


class RequestBody(StrictBody):
    """Fields of both endpoints."""

    refused: ClassVar[RefusedFields] = GENERATION
    spelt: ClassVar[bool] = True

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None  # 0 and -1: all
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Biases = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    service_tier: Literal["auto", "default", "priority", "flex", "batch"] | None = (
        None  # flex, batch: after interactive requests
    )
    response_format: RawFormat = None  # binds the answer, like the next fields; at most one of them
    structured_outputs: RawForm = None
    guided_json: RawSchema = None
    guided_choice: Annotated[list[LongText] | None, JsonSize(MAX_SCHEMA_CHARS)] = None
    guided_regex: Annotated[str, Field(max_length=MAX_REGEX_CHARS)] | None = None
    json_schema: RawSchema = None

    @property
    def is_batch(self) -> bool:
        """Whether interactive requests run before this request."""
        return self.service_tier in ("flex", "batch")

    @model_validator(mode="after")
    def _consistent(self) -> RequestBody:
        if self.stream_options is not None and not self.stream:
            raise misfit("stream_options", "stream_options is only allowed with stream: true")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise misfit("best_of", "best_of is only supported equal to n")
        return self


class FunctionCall(WithoutNulls):
    """Function of a call in an earlier turn."""

    name: Text
    arguments: LongText = ""

    def renamed(self, new_name: Callable[[str], str]) -> FunctionCall:
        """Return the call with another name."""
        return self.model_copy(update={"name": new_name(self.name)})


class ToolCall(WithoutNulls):
    """A call in an earlier turn."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictBody):
    """One turn of a conversation."""

    refused: ClassVar[RefusedFields] = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: Text | None = None
    reasoning_content: LongText | None = None
    reasoning: LongText | None = None  # another name of ``reasoning_content``
    thinking: LongText | None = None  # third name of ``reasoning_content``
    refusal: Annotated[LongText | None, Field(exclude=True)] = None  # content of a turn that has no other
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Text | None = None
    function_call: FunctionCall | None = None  # a call in the form of older clients

    @model_validator(mode="before")
    @classmethod
    def _with_reasoning(cls, raw: Any) -> Any:
        return with_reasoning(cast("dict[str, Any]", raw)) if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        is_result = self.tool_call_id is not None or self.name is not None  # both may be empty texts
        if self.content is None and self.role != "assistant" and not (is_result and self.role in ("tool", "function")):
            raise misfit("content", f"content is required for role '{self.role}'")
        return self

    def renamed(self, new_name: Callable[[str], str]) -> Message:
        """Return the message with other names of the functions that it calls, or whose result it is."""
        changes: dict[str, Any] = {}
        if self.name is not None and self.role in ("tool", "function"):
            changes["name"] = new_name(self.name)
        if self.tool_calls:
            changes["tool_calls"] = [
                call.model_copy(update={"function": call.function.renamed(new_name)}) for call in self.tool_calls
            ]
        if self.function_call is not None:
            changes["function_call"] = self.function_call.renamed(new_name)
        return self.model_copy(update=changes) if changes else self


def _num_chars(message: Message) -> int:
    called = [call.function for call in message.tool_calls or ()]
    called += [message.function_call] if message.function_call is not None else []
    calls = sum(len(function.arguments) for function in called)
    return len(message.content or "") + len(message.reasoning_content or "") + calls


def _bounded(messages: list[Message]) -> list[Message]:
    if sum(map(_num_chars, messages)) > MAX_CONVERSATION_CHARS:
        raise ValueError(f"they have more than {MAX_CONVERSATION_CHARS} characters together")
    if sum(len(message.tool_calls or ()) for message in messages) > MAX_CALLS:
        raise ValueError(f"they have more than {MAX_CALLS} tool calls together")
    return messages


Keywords = Annotated[dict[str, Any], Field(max_length=32), JsonSize(_MAX_KEYWORDS_CHARS)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_bounded)]


Effort = Annotated[str, Field(max_length=32)]


class Thinking(WithoutNulls):
    """The field ``thinking`` of Anthropic's and GLM's clients."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenLimitFromZero | None = None


class ReasoningOptions(WithoutNulls):
    """The field ``reasoning`` of OpenRouter's clients."""

    refused: ClassVar[RefusedFields] = REASONING

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: TokenLimitFromZero | None = None


class ChatBody(RequestBody):
    """``POST /v1/chat/completions``."""

    refused: ClassVar[RefusedFields] = CHAT

    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: RawTools | None = None
    tool_choice: RawToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None  # shorthand for chat_template_kwargs
    thinking: Thinking | None = None  # another server's form of enable_thinking, like the next field
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: TokenLimitFromZero | None = None  # limit of the reasoning, which the gateway closes then
    thinking_budget: TokenLimitFromZero | None = None  # Qwen's name of thinking_token_budget
    chat_template_kwargs: Keywords | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise misfit("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        return self


class CompletionBody(RequestBody):
    """``POST /v1/completions``."""

    refused: ClassVar[RefusedFields] = COMPLETION

    max_tokens: TokenLimitFromZero | None = None  # 0: scores of the prompt only
    add_special_tokens: bool | None = None  # text prompts get special tokens unless false
    prompt: Annotated[Prompts, BeforeValidator(_prompts, json_schema_input_type=Prompt | Prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # alternatives per token


class TokenizeBody(StrictBody):
    """``POST /tokenize``: a text, or a conversation, rendered as its prompt."""

    refused: ClassVar[RefusedFields] = TOKENIZE

    model: Text | None = None
    prompt: LongText | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # a text gets special tokens; a template adds its own
    return_token_strs: bool | None = None
    tools: RawTools | None = None  # functions that the conversation's prompt shows
    chat_template_kwargs: Keywords | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise misfit("prompt", "either prompt or messages is required")
        return self


class DetokenizeBody(StrictBody):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS)]
