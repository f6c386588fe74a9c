"""Claude Code, the real program, against a gateway whose engine has a script. Skipped where ``claude`` is missing.

It runs in a home of its own, with a name of no account, and every address but this machine's is a closed port.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgepipe.cli.programs import PROGRAMS
from edgepipe.cli.programs import Served as ServedModel
from edgepipe.errors import EdgepipeError, StageLost
from tests.support.gateways.family_assets import FamilyAssets
from tests.support.gateways.scripted_engine import ScriptedEngine, with_context
from tests.support.gateways.server import serving

CLAUDE = shutil.which("claude")
pytestmark = pytest.mark.skipif(CLAUDE is None, reason="the program 'claude' is not installed")

TEMPLATE = """{% if tools %}<tools>{{ tools|tojson }}</tools>{# <tool_call> <think> #}{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}
</tool_call>{% endfor %}{% endfor %}<assistant>"""
CLOSED = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True)
class Run:
    """How the program ended."""

    code: int
    printed: str
    engine: ScriptedEngine


def calls(*commands: str) -> bytes:
    """An answer of the model that runs commands of a shell."""
    return "\n".join(
        '<tool_call>\n{"name": "Bash", "arguments": ' + json.dumps({"command": each, "description": "d"}) + "}\n"
        "</tool_call>"
        for each in commands
    ).encode()


@asynccontextmanager
async def gateway(engine: ScriptedEngine, context_length: int) -> AsyncIterator[str]:
    """The address of a gateway."""

    async with serving(
        engine, load=lambda path: FamilyAssets(TEMPLATE), change=lambda view: with_context(view, context_length)
    ) as served:
        yield f"http://127.0.0.1:{served.port}"


async def run(
    folder: Path, script: Sequence[bytes | EdgepipeError], *, context: int = 400_000, broken_after: int = 4
) -> Run:
    """What the program makes of a prompt, with the settings that ``edgepipe connect claude`` prints."""
    engine = ScriptedEngine(script=script, group=64, broken_after=broken_after)
    async with gateway(engine, context) as url:
        settings = PROGRAMS["claude"](ServedModel(base_url=url, model="tiny", context_length=context))
        quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER")
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(folder),
            settings.key_variable: "edgepipe",
            **settings.variables,
            **dict.fromkeys(quiet, "1"),
            "HTTPS_PROXY": CLOSED,
            "HTTP_PROXY": CLOSED,
            "NO_PROXY": "127.0.0.1",
        }
        assert CLAUDE is not None
        program = await asyncio.create_subprocess_exec(
            CLAUDE, "-p", "Run it.", "--allowedTools", "Bash",
            cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(90):
                printed, _ = await program.communicate()
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
        return Run(program.returncode or 0, printed.decode(errors="replace"), engine)


async def test_two_calls_at_once(tmp_path: Path) -> None:
    """The first command ends last; its result is the first in the prompt."""
    ended = await run(tmp_path, [calls("sleep 1; echo ap-ple", "echo che-rry"), b"All done."])
    assert (ended.code, ended.printed.strip()) == (0, "All done.")
    first, second = ended.engine.prompt(0), ended.engine.prompt(1)
    answered = second.rpartition("</tool_call>")[2]
    assert 0 < answered.index("ap-ple") < answered.index("che-rry")
    assert second.startswith(first.rpartition("<assistant>")[0]), "the prompt before stays cached"
    assert "x-anthropic-billing-header" not in first


async def test_one_call_after_reasoning(tmp_path: Path) -> None:
    thought = b"<think>The user wants an apple.</think>"
    ended = await run(tmp_path, [thought + calls("echo ap-ple"), thought + b"All done."])
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
