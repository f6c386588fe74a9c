"""Codex' command line against a gateway, where it is installed, and its recorded requests, where it is not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from edgepipe.errors import StageLost
from tests.support.gateways.agent_programs import CONTEXT, agents_gateway, calls, needs, run_agent
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.scripted_engine import Scripted, ScriptedEngine, with_context
from tests.support.gateways.server import serving

RECORDED = Path(__file__).resolve().parents[2] / "data" / "clients" / "codex-0.171.0.json"
LARGE = partial(with_context, num_tokens=CONTEXT)
needs_codex = needs("codex")


def run(*commands: str) -> bytes:
    """An answer of the model that runs commands."""
    return calls(*[("exec_command", {"cmd": command}) for command in commands])


async def _codex(
    folder: Path, script: list[Scripted], *, context: int = CONTEXT
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what codex reports of a turn, and the prompts that the engine got."""
    engine = ScriptedEngine(script=script, group=50)
    async with agents_gateway(engine, context=context) as url:
        ended = await run_agent("codex", "Run commands", folder=folder, url=url, context=context)
    events = [json.loads(line) for line in ended.printed.splitlines() if line.startswith("{")]
    return events, [engine.prompt(place) for place in range(len(engine.submits))]


def _done(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each["item"] for each in events if each["type"] == "item.completed" and each["item"]["type"] == kind]


@needs_codex
async def test_codex_runs_one_command_then_two_at_once_then_reasons(tmp_path: Path) -> None:
    script: list[Scripted] = [
        run("echo one"),
        run("echo two", "echo three"),
        b"<think>All ran.</think>\n\nThree commands ran.",
    ]
    events, prompts = await _codex(tmp_path, script)
    commands = _done(events, "command_execution")
    assert sorted(item["aggregated_output"] for item in commands) == ["one\n", "three\n", "two\n"]
    assert [item["text"] for item in _done(events, "agent_message")] == ["Three commands ran."]
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["reasoning_output_tokens"] > 0
    assert len(prompts) == 3
    assert prompts[2].index("Output:\ntwo") < prompts[2].index("Output:\nthree")


@needs_codex
async def test_codex_asks_again_after_an_engine_was_lost_in_mid_answer(tmp_path: Path) -> None:
    events, prompts = await _codex(tmp_path, [StageLost("stage 1 ended"), b"Here again."])
    assert [item["text"] for item in _done(events, "agent_message")] == ["Here again."]
    assert len(prompts) == 2


@needs_codex
async def test_codex_knows_a_full_context(tmp_path: Path) -> None:
    events, prompts = await _codex(tmp_path, [b"unused"], context=4096)
    assert prompts == []
    assert events[-1]["type"] == "turn.failed"
    assert "context window" in events[-1]["error"]["message"]


async def test_recorded_requests_are_answered() -> None:
    requests = json.loads(RECORDED.read_text(encoding="utf-8"))
    async with serving(FakeEngine(answer=b"Done.", group=10), change=LARGE) as served:
        for request in requests:
            answer = await served.http.post(request["path"], json=request["body"], headers=request["headers"])
            assert answer.status_code == 200, answer.text
            assert "event: response.completed" in answer.text
        prompt = bytes(served.engine.submits[-1].prompt).decode()
        assert "multi_agent_v1__spawn_agent" in prompt
        assert "web_search" not in prompt
        assert prompt.index("Output:\none") < prompt.index("Output:\ntwo")
