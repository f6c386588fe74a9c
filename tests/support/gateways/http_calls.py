"""Generated requests over all fields that HTTP takes; more than half are valid.

Every body is a working one to which fields were added, some with a value that the field usually refuses. A new field
of a body without values here fails ``test_every_field_of_every_body_is_generated``.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel

from edgepipe.gateway.protocols.ollama.body import OllamaChatBody, OllamaGenerateBody, Options
from edgepipe.gateway.schema import ChatBody, CompletionBody
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, SMALLEST_VOCAB

Values = SearchStrategy[Any]
Fields = Mapping[str, tuple[Values, Values]]  # for each field: values that usually work, and values that usually do not

HUGE = (1 << 31, (1 << 31) - 1, 1 << 32, 1 << 63, (1 << 63) - 1, 1 << 64, 10**30)
Row = dict[str, tuple[Any, Any]]
STAYS = (*["read"] * 16, "first part", "first part", "sent", "half sent")
_SUPPRESSED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
_TOGETHER = (
    ("min_tokens", "stop_token_ids"),
    ("min_tokens", "stop_token_ids", "stream"),
    ("min_tokens", "max_tokens", "ignore_eos"),
    ("logprobs", "top_logprobs", "n"),
    ("logprobs", "echo", "prompt", "stream"),
    ("tools", "tool_choice", "parallel_tool_calls"),
    ("response_format", "max_tokens", "logit_bias"),
    ("stream", "stream_options"),
    ("n", "best_of", "stream"),
)
_TOGETHER_SHARE = 0.5  # share of bodies with fields that act on one another
_LARGE, _LARGE_SHARE = "x" * 140_000, 0.01  # such a body is read in another process
_BAD_SHARE = 0.15  # share of fields with a value that usually does not work


@dataclass(frozen=True, slots=True)
class Call:
    """One request, and how long its client stays."""

    path: str
    body: dict[str, Any]
    stays: str = "read"  # to the end | "first part" of the answer | once all is "sent" | with "half sent"

    def __str__(self) -> str:
        return f"POST {self.path} {json.dumps(self.body)} ({self.stays})"


def drawn_calls(count: int, *, number: int) -> list[Call]:
    """Requests of a seed: Hypothesis makes the values of each field, chance puts them together."""
    rng = random.Random(number)
    rows = {target.path: _drawn_rows(target, 25 + count // 100, number=number) for target in TARGETS}
    targets = rng.choices(TARGETS, [len(target.fields) for target in TARGETS], k=count)
    return [_drawn_call(rng, target, rows[target.path]) for target in targets]


def _drawn_rows(target: Target, count: int, *, number: int) -> list[Row]:
    """So many times a value that usually works and one that does not for every field."""
    rows: list[Row] = []
    fields = {name: st.tuples(*values) for name, values in {**_UNSUPPORTED, **target.fields}.items()}

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=_SUPPRESSED)
    @given(st.fixed_dictionaries(fields))
    def collect(row: Row) -> None:
        rows.append(row)

    collect()
    return rows


def _drawn_call(rng: random.Random, target: Target, rows: list[Row]) -> Call:
    names = rng.sample(sorted({*_UNSUPPORTED, *target.fields}), rng.randrange(len(target.fields) // 4))
    if rng.random() < _TOGETHER_SHARE:
        names += [name for name in rng.choice(_TOGETHER) if name in target.fields and name not in names]
    body = {name: rng.choice(rows)[name][rng.random() < _BAD_SHARE] for name in names}
    if rng.random() < _LARGE_SHARE:
        body["ignored"] = _LARGE
    return Call(target.path, {**target.works, **body}, rng.choice(STAYS))


def smaller(value: Any) -> Iterator[Any]:
    """Simpler values than this one, the simplest first."""
    changed: Any
    if isinstance(value, dict):
        for key in value:
            yield {other: entry for other, entry in value.items() if other != key}
    elif isinstance(value, list):
        yield from ([] if value else ())
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
    elif isinstance(value, str) and len(value) > 1:
        yield from (value[:1], value[: len(value) // 2])
    for key, entry in _entries(value):
        for less in smaller(entry):
            changed = copy.copy(value)
            changed[key] = less
            yield changed


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Keys or places of a value's parts, with the parts."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def named_field(text: str, body: Mapping[str, Any]) -> bool:
    """Whether an error's text has the name of a field, or says that no field could be read."""
    error = json.loads(text)["error"]
    message = error if isinstance(error, str) else error["message"]
    if message.startswith("the body is not valid") and not _is_json(body):
        return True
    words = set(re.findall(r"\w+", message if isinstance(error, str) else str(error["param"])))
    return not words.isdisjoint(KNOWN)


def _is_json(body: Mapping[str, Any]) -> bool:
    """Whether it has only finite numbers and whole characters."""
    try:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def _one_of(*values: Any) -> Values:
    return st.sampled_from(values)


_ANYTHING = st.sampled_from(
    (
        *(None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), *HUGE),
        *("", "x", "\x00", "\ud800", "x" * 2000, [], [[]], [None], {}, {"": None}, {"type": "function"}),
    )
) | st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
_SWITCH = _one_of(True, False, None)
_TOKEN = st.integers(0, SMALLEST_VOCAB - 1) | _one_of(0, EOS_TOKEN_ID, SMALLEST_VOCAB - 1)
_BEYOND = _one_of(SMALLEST_VOCAB, SMALLEST_VOCAB + 1, 50_000, 2_000_000_000, (1 << 31) - 1)
_BAD_TOKEN = _BEYOND | _one_of(-1, -(1 << 63), True, 1.0, "1", None, *HUGE)
_TEXT = _one_of("a", "hello", "\n", " ", "é😀", "<|im_end|>", "<|im_start|>", "\x00", "x" * 300) | st.text(max_size=6)
_COUNT = st.integers(1, 12)


_IDS = st.lists(_TOKEN, max_size=6)
_BAD_IDS = st.builds(lambda good, bad: [*good, bad], st.lists(_TOKEN, max_size=2), _BAD_TOKEN)
_MANY_IDS = _one_of([*range(64)], [EOS_TOKEN_ID] * 64)
_PROMPT = _TEXT | st.lists(_TOKEN, min_size=1, max_size=12) | _one_of([7] * 100)
_SEED = st.integers(-(1 << 63), (1 << 63) - 1) | _one_of(0, -1, None)


def _seldom(*values: Any) -> Values:
    """Mostly nothing: fields that exclude one another leave most bodies valid."""
    return _one_of(*[None] * 8, *values)


def _field(works: Values, *bad: Any) -> tuple[Values, Values]:
    """A field's values: those that usually work, and with the bad ones anything at all."""
    return works, (_one_of(*bad) | _ANYTHING if bad else _ANYTHING)


def _number(low: float, high: float, *bad: Any) -> tuple[Values, Values]:
    """Within the bounds and on them; just outside."""
    return _field(st.floats(low, high) | _one_of(low, high, None), low - 1e-9, high + 1e-9, *bad)


_LEAF_SCHEMA = _one_of(
    {},
    {"type": "integer", "minimum": -3, "maximum": 3},
    {"type": "number", "multipleOf": 0.1},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "string", "pattern": "(a|a)*b"},
    {"type": "string", "pattern": "(((("},
    {"type": "string", "pattern": "[a-z]{1,100000}"},
    {"type": "string", "pattern": "\\p{L}+(?=x)"},
    {"type": "string", "format": "date-time"},
    {"enum": ["x", 1, None]},
    {"enum": []},
    {"const": "\x00é😀"},
    {"type": "null"},
    {"type": "wizard"},
    {"type": ["integer", "null"]},
    {"$ref": "#"},
    {"$ref": "#/$defs/none"},
    {"$ref": "https://example.com/schema"},
    {"x-guidance": {"whitespace_pattern": ".*"}},
)


def _larger_schema(inner: Values) -> Values:
    names = _one_of("a", "b", "", "é", '"', "a.b")
    properties = st.dictionaries(names, inner, max_size=3)
    return st.one_of(
        properties.map(lambda fields: {"type": "object", "properties": fields, "additionalProperties": False}),
        properties.map(lambda fields: {"type": "object", "properties": fields, "required": [*fields, "missing"]}),
        inner.map(lambda schema: {"type": "array", "items": schema, "maxItems": 3}),
        inner.map(lambda schema: {"type": "array", "items": schema, "minItems": 1 << 31}),
        st.lists(inner, max_size=3).map(lambda many: {"anyOf": many}),
        st.lists(inner, max_size=2).map(lambda many: {"allOf": many}),
        inner.map(lambda schema: {"not": schema}),
        inner.map(lambda schema: {"$defs": {"x": schema}, "$ref": "#/$defs/x"}),
    )


_SCHEMA = st.recursive(_LEAF_SCHEMA, _larger_schema, max_leaves=4)
_FORMAT = _SCHEMA.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
_NAME = _one_of("look", "find", "a-b_c")
_TOOL = st.builds(
    lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}}, _NAME, _SCHEMA
)
_BAD_TOOLS = (
    [{}],
    [{"type": "code"}],
    [None],
    [{"type": "function", "function": {"name": "a b"}}],
    {"type": "function"},
)
_TOOLS = (st.lists(_TOOL, max_size=3) | _one_of(None), st.lists(_TOOL, min_size=4, max_size=5) | _one_of(*_BAD_TOOLS))
_CHOICE = _field(
    _one_of(None, "none", "auto", "required", {"type": "function", "function": {"name": "look"}}),
    "x",
    {"type": "function"},
)
_PARTS = st.lists(_TEXT.map(lambda text: {"type": "text", "text": text}), max_size=2)
_CALL = _one_of(
    {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{"}},
    {"function": {"name": "look", "arguments": '{"a": [1]}'}},
)
_ROLE = _one_of("user", "user", "system", "assistant", "tool")
_MESSAGE = st.fixed_dictionaries(
    {"role": _ROLE, "content": _TEXT | _PARTS},
    optional={"tool_calls": st.lists(_CALL, max_size=2), "name": _TEXT, "tool_call_id": _TEXT},
)
_BAD_MESSAGES = (
    [],
    [{"role": "wizard", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    [{"role": "user", "content": "x" * 600}],
)

SHARED: Fields = {
    "model": _field(_one_of("tiny", None), "", "nothing", "tiny/..", "x" * 300),
    "stream": _field(_one_of(True, True, False, None)),
    "stream_options": _field(
        _one_of(None, {"include_usage": True, "continuous_usage_stats": True}), {"include_usage": 1}
    ),
    "max_tokens": _field(_COUNT, 0, -1, 700, *HUGE),
    "min_tokens": _field(st.integers(0, 6), 10, -1, 1 << 31),
    "temperature": _number(0, 2, 1e-300, 1e308),
    "top_p": _number(1e-6, 1, 0, 5e-324, 1e-300),
    "top_k": _field(st.integers(-1, 300), -2, *HUGE),
    "min_p": _number(0, 1, 1e308),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100, 0, -1, 1e308),
    "logit_bias": (
        st.dictionaries(_TOKEN.map(str), st.floats(-100, 100) | _one_of(-100, 100), max_size=4)
        | _one_of(None, {str(token): -100 for token in range(SMALLEST_VOCAB)}),
        st.dictionaries(
            _one_of("1", "259", "2000000000", "-1", "1e3", "01", "x", "", str(1 << 63)),
            _one_of(1, 1, -101, 1e308, None, "1"),
            max_size=2,
        ),
    ),
    "seed": _field(st.integers(-(1 << 63), (1 << 63) - 1) | _one_of(0, -1, None), 1 << 63, -(1 << 63) - 1),
    "stop": _field(
        _TEXT.filter(bool) | st.lists(_TEXT.filter(bool), max_size=8) | _one_of(None, ["x" * 256]),
        *("", ["a"] * 65, [""], ["x" * 257]),
    ),
    "stop_token_ids": (_IDS | _MANY_IDS, _BAD_IDS),
    "ignore_eos": _field(_SWITCH),
    "return_token_ids": _field(_SWITCH),
    "n": _field(st.integers(1, 4), 0, 8, 9, -1, *HUGE),
    "best_of": _field(_one_of(1, None), 0, 2, 9),
    "user": _field(_TEXT, "x" * 1025),
    "service_tier": _field(_one_of("auto", "flex", "batch", "priority", None), "gold"),
    "response_format": _field(
        _FORMAT | _one_of(None, {"type": "text"}, {"type": "json_object"}), {"type": "json_schema"}, {"type": "xml"}
    ),
    "structured_outputs": _field(
        _seldom({"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"json": {"type": "null"}}, {"json_object": True}),
        *({}, {"grammar": "x"}, {"regex": "("}, {"regex": "a", "choice": ["b"]}),
    ),
    "guided_json": _field(_seldom({"type": "integer"}, '{"type": "boolean"}'), {"type": "x"}, "{", 3),
    "guided_choice": _field(_seldom(["yes", "no"]), [], [1], "yes"),
    "guided_regex": _field(_seldom("a|b", "[0-9]{1,3}/x"), "((", "a(?=b)", "\\", 3),
    "json_schema": _field(_seldom({"type": "integer"}), {"type": "x"}, []),
}
CHAT: Fields = {
    **SHARED,
    "messages": _field(st.lists(_MESSAGE, min_size=1, max_size=3), *_BAD_MESSAGES),
    "max_completion_tokens": _field(_COUNT, 0, 1 << 31),
    "logprobs": _field(_one_of(True, True, False, None)),
    "top_logprobs": _field(st.integers(0, 20), -1, 21),
    "tools": _TOOLS,
    "tool_choice": _CHOICE,
    "parallel_tool_calls": _field(_SWITCH),
    "reasoning_effort": _field(_one_of("low", "high", "", None), "x" * 33),
    "enable_thinking": _field(_SWITCH),
    "thinking": _field(_seldom({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 3}), {"type": "x"}, True),
    "reasoning": _field(_seldom({}, {"effort": "low"}, {"max_tokens": 3}), {"exclude": True}, {"enabled": 1}, "x"),
    "thinking_budget": _field(_seldom(3, 0, -1), -2, "x"),
    "thinking_token_budget": _field(_COUNT | _one_of(None, -1, 0), -2, *HUGE),
    "chat_template_kwargs": _field(
        _one_of(None, {}, {"enable_thinking": False}), {"messages": []}, {"x" * 70: 1}, {"tools": 1}
    ),
}
COMPLETION: Fields = {
    **SHARED,
    "prompt": (
        _PROMPT | st.lists(_PROMPT, min_size=1, max_size=3),
        _BAD_IDS | _one_of("", [], [""], [[]], [[0], "a"], [0, "a"], [[0] * 600]) | _ANYTHING,
    ),
    "echo": _field(_SWITCH),
    "logprobs": _field(st.integers(0, 20) | _one_of(None), -1, 21, True),
    "add_special_tokens": _field(_SWITCH),
}
OPTIONS: Fields = {
    "temperature": SHARED["temperature"],
    "top_k": SHARED["top_k"],
    "top_p": SHARED["top_p"],
    "min_p": SHARED["min_p"],
    "seed": SHARED["seed"],
    "stop": SHARED["stop"],
    "num_predict": _field(_COUNT | _one_of(None, -1, -2, 0), -3, *HUGE),
    "repeat_penalty": SHARED["repetition_penalty"],
    "presence_penalty": SHARED["presence_penalty"],
    "frequency_penalty": SHARED["frequency_penalty"],
}


def _options(which: int) -> Values:
    return st.fixed_dictionaries({}, optional={name: values[which] for name, values in OPTIONS.items()})


_OLLAMA: Fields = {
    "model": _field(_one_of("tiny", "tiny:latest"), None, "", "nothing", "x" * 300),
    "stream": _field(_one_of(True, False)),
    "format": _field(_SCHEMA | _one_of(None, "", "json"), "xml"),
    "options": (_options(0) | _one_of(None, {}), _options(1) | _ANYTHING),
    "logprobs": _field(_one_of(True, False)),
    "top_logprobs": _field(st.integers(0, 20), -1, 21),
    "think": _field(_one_of(None, True, False, "low"), "much", 3),
    "keep_alive": _field(_one_of(None, "5m", "1h30m", 60, 0.5, -1), "soon", True, "-"),
}
_OLLAMA_CALL = _one_of({"function": {"name": "look", "arguments": {"a": 1}}}, {"function": {"name": "look"}})
_OLLAMA_TURN = st.fixed_dictionaries(
    {"role": _ROLE, "content": _TEXT},
    optional={"tool_calls": st.lists(_OLLAMA_CALL, max_size=2), "tool_name": _TEXT, "images": _one_of(None, [])},
)
OLLAMA_CHAT: Fields = {
    **_OLLAMA,
    "messages": _field(st.lists(_OLLAMA_TURN, max_size=3), *_BAD_MESSAGES, [{"role": "user", "images": ["x"]}]),
    "tools": _TOOLS,
}
OLLAMA_GENERATE: Fields = {
    **_OLLAMA,
    "prompt": _field(_TEXT | _one_of(""), "x" * 600),
    "system": _field(_TEXT | _one_of(None, "")),
    "raw": _field(_one_of(True, False)),
    "images": _field(_one_of(None, []), ["x"]),
}
_NAMES_ELSEWHERE = ("suffix", "prompt_logprobs", "functions", "chat_template", "audio")
_UNSUPPORTED: Fields = {name: _field(_one_of(None)) for name in _NAMES_ELSEWHERE}
_USER = [{"role": "user", "content": "hi"}]
_FEW = {"num_predict": 6}


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint, the body it works with, and values for its fields."""

    path: str
    body: type[BaseModel]
    works: Mapping[str, Any]
    fields: Fields


TARGETS = (
    Target("/v1/chat/completions", ChatBody, {"messages": _USER, "max_tokens": 6}, CHAT),
    Target("/v1/completions", CompletionBody, {"prompt": "hi", "max_tokens": 6}, COMPLETION),
    Target("/api/chat", OllamaChatBody, {"model": "tiny", "messages": _USER, "options": _FEW}, OLLAMA_CHAT),
    Target("/api/generate", OllamaGenerateBody, {"model": "tiny", "prompt": "hi", "options": _FEW}, OLLAMA_GENERATE),
)
BODIES: Mapping[type[BaseModel], Fields] = {target.body: target.fields for target in TARGETS} | {Options: OPTIONS}
KNOWN = {name for fields in (*BODIES.values(), _UNSUPPORTED) for name in fields}
