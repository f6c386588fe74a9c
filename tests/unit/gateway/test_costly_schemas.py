"""Schemas whose compilation takes too long are refused by the gateway, with what it took."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from edgepipe.errors import RequestInvalid
from edgepipe.gateway.answer_form import answer_form
from edgepipe.gateway.formats.hermes import HERMES
from edgepipe.gateway.grammar_trial import GrammarTrial
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.schema import CompletionBody
from edgepipe.gateway.structured import GrammarCompiler, plan_output
from edgepipe.gateway.tool_choice import choose_tools
from edgepipe.sampling.grammar import json_grammar
from tests.support.gateways.costly_schemas import multiples_in_a_range

COSTLY = multiples_in_a_range(20, 900_000)


@pytest.fixture
async def trial() -> AsyncGenerator[GrammarTrial]:
    trial = GrammarTrial()
    yield trial
    await trial.child.end()


async def test_a_schema_of_multiples_in_a_range_is_refused_with_its_cost(trial: GrammarTrial) -> None:
    """Its check took nothing, and its building at the last stage seconds for each property."""
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": COSTLY}}
    fields = {"model": "m", "prompt": "x", "response_format": form}
    with pytest.raises(HttpProblem) as caught:
        await plan_output(
            form=answer_form(CompletionBody.model_validate(fields)), compiler=GrammarCompiler(trial.check)
        )
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith("response_format")
    message = caught.value.message
    assert "s of processor time and" in message
    assert "at most 0.5 s and 256 MiB are allowed" in message


async def test_the_child_outlives_what_it_refuses(trial: GrammarTrial) -> None:
    """Another user's schema does not wait for a new process."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": COSTLY, "strict": True}}]
    await trial.check(json_grammar({}))
    process = trial.child._processes[0]._child  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(HttpProblem) as caught:
        await plan_output(choice=choose_tools(tools, "required"), chat=HERMES, compiler=GrammarCompiler(trial.check))
    assert caught.value.param == "tools"
    await trial.check(json_grammar({"type": "integer"}))
    assert trial.child._processes[0]._child is process  # pyright: ignore[reportPrivateUsage]


async def test_a_schema_that_every_output_fails_is_refused_at_once(trial: GrammarTrial) -> None:
    """An object with so many optional properties is too complex after its brace."""
    properties = {f"p{index}": {"type": "string", "maxLength": index} for index in range(900)}
    with pytest.raises(RequestInvalid, match="cannot constrain the output"):
        await trial.check(json_grammar({"type": "object", "properties": properties, "additionalProperties": False}))
