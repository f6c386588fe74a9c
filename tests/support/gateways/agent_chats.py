"""Recorded chats of coding agents, and the turns of a model that they were recorded with.

``scripts/record_agents.py`` writes them. A long text of the program's makers is cut there; reading a chat fills it up
to its length again, so that shares of prompts are those of the real ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from edgepipe.gateway.conversation import render_chat
from edgepipe.gateway.protocols.anthropic.body import MessagesBody
from edgepipe.gateway.protocols.responses.body import ResponsesBody, asked
from edgepipe.gateway.schema import ChatBody
from edgepipe.gateway.strict_body import validate
from edgepipe.gateway.tool_choice import ToolChoice, choose_tools
from tests.support.gateways.family_assets import FamilyAssets

FOLDER = Path(__file__).resolve().parents[2] / "data" / "clients" / "chats"
_CUT = re.compile(r"\[cut: (\d+) characters, ([0-9a-f]{8})\]\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn of the model."""

    thought: str = ""
    text: str = ""
    commands: tuple[str, ...] = ()  # commands of a shell, each in a call of its own

    def calls(self, program: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls by the names of a program's tools."""
        if program == "codex":
            return [("exec_command", {"cmd": command}) for command in self.commands]
        name = "Bash" if program == "claude" else "bash"
        return [(name, {"command": command, "description": "Run it"}) for command in self.commands]


SCRIPT: Sequence[Sequence[Said]] = (
    (
        Said(thought="I look at the files first.", commands=("ls", "cat greet.py")),
        Said(thought="Now I run it.", text="It has one file. I run it.", commands=("python3 greet.py",)),
        Said(thought="That is clear.", text="The project prints **Hello**, and nothing else.\n\n- `greet.py`: 1 line"),
    ),
    (
        Said(text="I change the greeting.", commands=("sed -i 's/Hello/Good \"morning\"/' greet.py",)),
        Said(commands=("cat greet.py", "python3 greet.py || echo 'it fails: é 漢字 😀 <b> & \\t'")),
        Said(thought="Quotes within quotes.\n\nI write it anew.", commands=("printf 'print(\"Good\")\\n' > greet.py",)),
        Said(text="It greets in the morning."),
    ),
    (
        Said(thought="Are there tests?\nI search.", commands=("ls *.py", "grep -n test *.py || echo none")),
        Said(text="None yet.", commands=("mkdir tests\ncat > tests/test_greet.py <<'END'\nassert True\nEND",)),
        Said(thought="Done.", text="There is a test now:\n\n```python\nassert True\n```"),
    ),
)
"""Turns of the model for each question of the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentChat:
    """A recorded chat: each request begins with what the one before had."""

    program: str  # with its version
    path: str
    headers: Mapping[str, str]
    tools: Sequence[Any]  # the same in every request
    requests: Sequence[Mapping[str, Any]]  # bodies without tools

    @property
    def name(self) -> str:
        """The program's name."""
        return self.program.partition(" ")[0]

    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies as they were sent."""
        return [{**request, "tools": list(self.tools)} for request in self.requests]

    def chats(self) -> list[ChatBody]:
        """Return the requests in the common form."""
        return [self._chat(body) for body in self.bodies()]

    def _chat(self, body: dict[str, Any]) -> ChatBody:
        if self.path.startswith("/v1/messages"):
            return validate(MessagesBody, body).chat()
        if self.path.startswith("/v1/responses"):
            return asked(validate(ResponsesBody, body), ()).chat
        return validate(ChatBody, body)

    async def prompts(self, assets: FamilyAssets) -> list[str]:
        """Return the prompts of the requests, with a family's template."""
        return [await render_chat(assets, chat, chosen(assets, chat), owner="", defaults={}) for chat in self.chats()]


def chosen(assets: FamilyAssets, chat: ChatBody) -> ToolChoice:
    """Return the tools of a request as the gateway chooses them for a template."""
    choice = choose_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    return choice.with_one_call() if assets.traits.choose(tools=bool(choice.tools)).one_call else choice


def recorded_chats() -> list[AgentChat]:
    """Return all recorded chats."""
    return [
        AgentChat(**_filled(json.loads(path.read_text(encoding="utf-8")))) for path in sorted(FOLDER.glob("*.json"))
    ]


def _filled(value: Any) -> Any:
    """Fill texts that were cut up to their length. Equal texts stay equal, others differ."""
    if isinstance(value, str):
        found = _CUT.search(value)
        return value if found is None else value + f" {found[2]}" * ((int(found[1]) - len(value)) // 9)
    if isinstance(value, dict):
        return {name: _filled(each) for name, each in cast("dict[str, Any]", value).items()}
    return [_filled(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def cut(text: str, length: int, digest: str) -> str:
    """Return the beginning of a text, with its length and its digest."""
    return f"{text[:length]}[cut: {len(text)} characters, {digest[:8]}]"
