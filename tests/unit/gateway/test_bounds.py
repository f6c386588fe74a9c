"""Every field of every body has a bound, and the API's document tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgepipe.gateway.completion_service import _scored_limit  # pyright: ignore[reportPrivateUsage]
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.ollama.body import OllamaChatBody, OllamaGenerateBody, ShowBody
from edgepipe.gateway.raw_fields import JSON_SIZE
from edgepipe.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from edgepipe.gateway.strict_body import StrictBody
from edgepipe.sampling import SamplingParams
from edgepipe.sampling.params import MAX_COUNT
from edgepipe.wire.intake import MAX_SCORES
from tests.support.gateways.fake_engine import ByteAssets
from tests.support.gateways.server import Served

BODIES = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, OllamaChatBody, OllamaGenerateBody, ShowBody]


def unbounded(schema: dict[str, Any], definitions: dict[str, Any], path: str) -> Iterator[str]:
    """Paths of a JSON schema under which values of any size may stand."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from unbounded(definitions[name], definitions, path)
        return
    if JSON_SIZE in schema or "enum" in schema or "const" in schema:
        return
    for kind in ("anyOf", "oneOf", "allOf"):
        if kind in schema:
            for each in schema[kind]:
                yield from unbounded(each, definitions, path)
            return
    match schema.get("type"):
        case "null" | "boolean":
            return
        case "string":
            good = "maxLength" in schema
        case "integer" | "number":
            good = bool({"minimum", "exclusiveMinimum"} & set(schema) and {"maximum", "exclusiveMaximum"} & set(schema))
        case "array":
            good = "maxItems" in schema
            yield from unbounded(schema["items"], definitions, f"{path}[]")
        case "object" if "properties" in schema:
            good = not schema.get("additionalProperties")
            for name, part in schema["properties"].items():
                yield from unbounded(part, definitions, f"{path}.{name}")
        case "object":
            good = "maxProperties" in schema
            yield from unbounded(schema.get("additionalProperties") or {}, definitions, f"{path}{{}}")
        case _:
            good = False
    if not good:
        yield path


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_of_a_body_has_a_bound(body: type[StrictBody]) -> None:
    schema = body.model_json_schema()
    assert set(schema["properties"]) == set(body.model_fields)
    assert list(unbounded(schema, schema.get("$defs", {}), body.__name__)) == []


def test_a_new_field_without_a_bound_is_found() -> None:
    class Careless(ChatBody):
        notes: str | None = None
        counts: list[int] | None = None

    schema = Careless.model_json_schema()
    found = set(unbounded(schema, schema["$defs"], "body"))
    assert found == {"body.notes", "body.counts", "body.counts[]"}


async def test_a_stop_id_that_the_model_does_not_have_is_refused_with_the_field_and_its_bound(served: Served) -> None:
    response = await served.chat(min_tokens=1, stop_token_ids=[2_000_000_000])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "stop_token_ids"
    assert "2000000000" in error["message"]
    assert f"0 to {ByteAssets.vocab_size - 1}" in error["message"]
    assert not served.engine.submits


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"min_tokens": 2**63}, "min_tokens"),
        ({"top_k": 2**63}, "top_k"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"best_of": 2**63}, "best_of"),
        ({"user": "x" * 1025}, "user"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2049}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": "x" * (5 << 20)}]}, "messages"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_field_beyond_its_bound_is_a_400_that_names_it(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    response = await served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert not served.engine.submits


async def test_log_probabilities_of_an_answer_are_bounded_together(served: Served) -> None:
    await served.complete(["ab"] * 8, logprobs=20, n=8, max_tokens=4000)
    assert len(served.engine.submits) == 8
    assert sum(each.num_choices * each.max_tokens for each in served.engine.submits) * 21 <= MAX_SCORES


def test_prompts_whose_log_probabilities_are_too_many_are_refused() -> None:
    sampling = SamplingParams(prompt_logprobs=True, logprobs=True, top_logprobs=20)
    most = MAX_SCORES // 21
    assert _scored_limit([[1] * (most - 100)], sampling, num_choices=1) == 100
    assert _scored_limit([[1] * (most // 2 - 100)], sampling, num_choices=2) == 100
    with pytest.raises(HttpProblem, match="logprobs"):
        _scored_limit([[1] * (most // 2)] * 3, sampling, num_choices=1)
    assert _scored_limit([[1] * most], SamplingParams(), num_choices=1) == MAX_COUNT
