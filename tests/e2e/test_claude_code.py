"""Claude Code, the real program, against a gateway whose engine has a script. Skipped where ``claude`` is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgepipe.errors import EdgepipeError, StageLost
from tests.support.gateways.agent_programs import CONTEXT, agents_gateway, calls, needs, run_agent
from tests.support.gateways.scripted_engine import ScriptedEngine

pytestmark = needs("claude")


@dataclass(frozen=True, slots=True)
class Run:
    """How the program ended."""

    code: int
    printed: str
    engine: ScriptedEngine


def shell(*commands: str) -> bytes:
    """An answer of the model that runs commands of a shell."""
    return calls(*[("Bash", {"command": each, "description": "d"}) for each in commands])


async def run(
    folder: Path, script: Sequence[bytes | EdgepipeError], *, context: int = CONTEXT, broken_after: int = 4
) -> Run:
    """What the program makes of a prompt."""
    engine = ScriptedEngine(script=script, group=64, broken_after=broken_after)
    async with agents_gateway(engine, context=context) as url:
        ended = await run_agent("claude", "Run it.", folder=folder, url=url, context=context)
    return Run(ended.code, ended.printed, engine)


async def test_two_calls_at_once(tmp_path: Path) -> None:
    """The first command ends last; its result is the first in the prompt."""
    ended = await run(tmp_path, [shell("sleep 1; echo ap-ple", "echo che-rry"), b"All done."])
    assert (ended.code, ended.printed.strip()) == (0, "All done.")
    first, second = ended.engine.prompt(0), ended.engine.prompt(1)
    answered = second.rpartition("</tool_call>")[2]
    assert 0 < answered.index("ap-ple") < answered.index("che-rry")
    assert second.startswith(first.rpartition("<assistant>")[0]), "the prompt before stays cached"
    assert "x-anthropic-billing-header" not in first


async def test_one_call_after_reasoning(tmp_path: Path) -> None:
    thought = b"<think>The user wants an apple.</think>"
    ended = await run(tmp_path, [thought + shell("echo ap-ple"), thought + b"All done."])
    assert (ended.code, ended.printed.strip()) == (0, "All done.")
    second = ended.engine.prompt(1)
    assert second.index("wants an apple") < second.rindex("echo ap-ple")


async def test_a_prompt_beyond_the_context(tmp_path: Path) -> None:
    ended = await run(tmp_path, [b"All done."], context=20_000)
    assert "prompt is too long" in ended.printed.lower()
    assert ended.engine.submits == []


@pytest.mark.parametrize("broken_after", [0, 4])
async def test_an_engine_that_ends_before_or_within_an_answer(tmp_path: Path, broken_after: int) -> None:
    ended = await run(tmp_path, [StageLost("stage 1 ended"), b"All done."], broken_after=broken_after)
    assert (ended.code, len(ended.engine.submits)) == (0, 2)
    assert "All done." in ended.printed
