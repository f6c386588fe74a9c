"""OpenCode and aider, the real programs: each edits a file as a scripted engine says. Skipped where one is missing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tests.support.gateways.agent_programs import AgentEngine, agents_gateway, calls, needs, run_agent
from tests.support.gateways.scripted_engine import ScriptedEngine

THOUGHT = b"<think>A greeting is wanted.</think>\n\n"
OLD, NEW = "print('hello')\n", "print('good morning')\n"


@needs("opencode")
async def test_opencode_reads_and_edits_a_file(tmp_path: Path) -> None:
    file = tmp_path / "greet.py"
    file.write_text(OLD)
    edit = {"filePath": str(file), "oldString": "hello", "newString": "good morning"}
    script = [THOUGHT + calls(("read", {"filePath": str(file)})), calls(("edit", edit)), b"The greeting is new."]
    engine = AgentEngine(script=script, group=50)
    async with agents_gateway(engine) as url:
        ended = await run_agent("opencode", "Change the greeting.", folder=tmp_path, url=url)
    assert file.read_text() == NEW, ended.printed
    assert "The greeting is new." in ended.printed
    prompts = [text for text in map(engine.prompt, range(len(engine.submits))) if "<tools>" in text]
    assert len(prompts) == 3
    assert "print('hello')" in prompts[1], "the file that it read"
    for earlier, later in pairwise(prompts):
        assert later.startswith(earlier.rpartition("<assistant>")[0]), "the prompt before stays cached"


@needs("aider")
async def test_aider_edits_a_file(tmp_path: Path) -> None:
    file = tmp_path / "greet.py"
    file.write_text(OLD)
    answer = THOUGHT + b"The greeting is new.\n\ngreet.py\n```\n" + NEW.encode() + b"```\n"
    engine = ScriptedEngine(script=[answer], group=50)
    async with agents_gateway(engine) as url:
        ended = await run_agent("aider", "Change the greeting.", folder=tmp_path, url=url, more=["greet.py"])
    assert file.read_text() == NEW, ended.printed
    assert (ended.code, len(engine.submits)) == (0, 1)
    assert json.dumps(OLD)[1:-1].strip("\\n") in engine.prompt(0)
