"""Coding agents, the real programs, against a gateway whose engine has a script.

Each runs in a home of its own, with the settings that ``edgepipe connect`` prints. For it, every address but this
machine's is a closed port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgepipe.gateway.programs import PROGRAMS
from edgepipe.gateway.programs import Served as ServedModel
from tests.support.gateways.family_assets import FamilyAssets
from tests.support.gateways.scripted_engine import ScriptedEngine, with_context
from tests.support.gateways.server import serving

TEMPLATE = """{% if tools %}<tools>{{ tools|tojson }}</tools>{# <tool_call> <think> #}{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}
</tool_call>{% endfor %}{% endfor %}<assistant>"""
"""Turns between tags; tools first."""

CONTEXT = 400_000  # tokens; a byte is a token here, so prompts have four times as many as elsewhere
END_S = 120.0  # longest run of a program
_CLOSED = "http://127.0.0.1:9"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_QUIET = {
    "claude": ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER"),
    "opencode": ("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD"),
}
"""Variables that keep a program from asking its makers."""

_ARGUMENTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "claude": (["--allowedTools=Bash,Read,Edit,Write", "--print"], ["--continue"]),
    "codex": (
        ["exec", "--profile", "edgepipe", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"],
        ["resume", "--last"],
    ),
    "opencode": (["run"], ["--continue"]),
    "aider": (["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--message"], []),
}
"""Arguments before a prompt, and those that continue the last chat."""

INSTALL = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "aider": "pipx install aider-chat",
}


def needs(program: str) -> pytest.MarkDecorator:
    """Skip tests where a program is not installed."""
    reason = f"the program '{program}' is not installed ({INSTALL[program]})"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


def calls(*named: tuple[str, Mapping[str, Any]]) -> bytes:
    """An answer of the model that calls tools."""
    bodies = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in named)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies).encode()


@dataclass(slots=True)
class AgentEngine(ScriptedEngine):
    """Answers requests with tools by the script. Programs also ask for a chat's title, without tools."""

    titles: int = field(default=0, init=False)

    async def _answer(self, submit: Any, have: Sequence[int], outbox: Any) -> None:
        if b"<tools>" in bytes(submit.prompt):
            await ScriptedEngine._answer(self, submit, have, outbox)
        else:
            self.titles += 1
            await ScriptedEngine(script=[b"A chat"], group=self.group)._answer(submit, have, outbox)


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended."""

    code: int
    printed: str


@asynccontextmanager
async def agents_gateway(engine: ScriptedEngine, *, context: int = CONTEXT) -> AsyncGenerator[str]:
    """The address of a gateway, without ``/v1``."""
    async with serving(
        engine, load=lambda path: FamilyAssets(TEMPLATE), change=lambda view: with_context(view, context)
    ) as served:
        yield f"http://127.0.0.1:{served.port}"


async def run_agent(
    program: str,
    prompt: str,
    *,
    folder: Path,
    url: str,
    context: int = CONTEXT,
    again: bool = False,
    more: Sequence[str] = (),
) -> Run:
    """Give a program a prompt in ``folder``, which is its home, too. ``again``: the chat of the last run goes on."""
    found = shutil.which(program)
    assert found is not None
    environment = _settings(program, folder, ServedModel(base_url=url, model="tiny", context_length=context))
    first, further = _ARGUMENTS[program]
    model = ["--model", "openai/tiny"] if program == "aider" else []
    process = await asyncio.create_subprocess_exec(
        found, *model, *first, *(further if again else ()), prompt, *more,
        cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(END_S):
            printed, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return Run(process.returncode or 0, printed.decode(errors="replace"))


def _settings(program: str, folder: Path, served: ServedModel) -> dict[str, str]:
    """Write the files that a program needs into its home; return its variables."""
    settings = PROGRAMS[program](served)
    if settings.file:
        file = folder / settings.file.removeprefix("~/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(settings.content, encoding="utf-8")
    key = {settings.key_variable: "edgepipe"} if settings.key_variable else {}
    return {
        "PATH": _PATH,
        "HOME": str(folder),
        "TERM": "dumb",
        **key,
        **settings.variables,
        **dict.fromkeys(_QUIET.get(program, ()), "1"),
        "HTTPS_PROXY": _CLOSED,
        "HTTP_PROXY": _CLOSED,
        "NO_PROXY": "127.0.0.1",
    }
