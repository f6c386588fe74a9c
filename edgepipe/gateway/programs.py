"""What programs need to use a served model: variables, files, a command. PURE."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL_CONTEXT = 32_768  # tokens: agents fill a smaller context within a few turns
_NO_KEY = "edgepipe"  # for programs that refuse to start without a key; a node that asks for none takes any
_MOST_OUTPUT = 32_000  # tokens that an agent may ask for in one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A served model, and where it answers."""

    base_url: str  # URL without /v1
    model: str
    context_length: int  # tokens of a prompt and its answer together
    key_file: Path | None = None  # None: the node asks for no key


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to set for one program."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    key_variable: str = ""  # variable that holds the key; empty: the program reads none
    unset: tuple[str, ...] = ()  # variables that would send another service's key
    file: str = ""  # path of a file of settings
    content: str = ""  # the lines that this file needs
    command: str = ""  # starts the program; empty for a library

    def to_json(self, served: Served) -> dict[str, Any]:
        """Return a JSON value. The key itself is never in it."""
        return {
            "model": served.model,
            "context_length": served.context_length,
            "base_url": served.base_url,
            "variables": dict(self.variables),
            "key_variable": self.key_variable,
            "key_file": str(served.key_file or ""),
            "unset": list(self.unset),
            "file": self.file,
            "content": self.content,
            "command": self.command,
        }

    def lines(self, served: Served) -> list[str]:
        """Return the settings for a person with a POSIX shell."""
        lines = [f"unset {' '.join(self.unset)}"] if self.unset else []
        if self.key_variable:
            key = f'"$(cat {shlex.quote(str(served.key_file))})"' if served.key_file else _NO_KEY
            lines.append(f"export {self.key_variable}={key}")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        if self.file:
            lines += [f"# Put these lines into {self.file}:", *self.content.splitlines(), "", "# Then type:"]
        return [*lines, *([self.command] if self.command else [])]


def _claude(served: Served) -> Settings:
    kinds = ("OPUS", "SONNET", "HAIKU", "FABLE")
    names = ["ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in kinds)]
    names += ["ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    return Settings(
        unset=("ANTHROPIC_API_KEY",),
        key_variable="ANTHROPIC_AUTH_TOKEN",
        variables={
            "ANTHROPIC_BASE_URL": served.base_url,
            **dict.fromkeys(names, served.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context_length),
        },
        command="claude",
    )


def _codex(served: Served) -> Settings:
    lines = [
        f"model = {json.dumps(served.model)}",
        'model_provider = "edgepipe"',
        f"model_context_window = {served.context_length}",
        f"model_auto_compact_token_limit = {served.context_length * 4 // 5}",
        "",
        "[model_providers.edgepipe]",
        'name = "edgepipe"',
        f'base_url = "{served.base_url}/v1"',
        'wire_api = "responses"',
        *(['env_key = "EDGEPIPE_KEY"'] if served.key_file else []),
    ]
    return Settings(
        key_variable="EDGEPIPE_KEY" if served.key_file else "",
        file="~/.codex/edgepipe.config.toml",  # a profile: the user's own settings stay as they are
        content="\n".join(lines),
        command="codex --profile edgepipe",
    )


def _opencode(served: Served) -> Settings:
    key = f"{{file:{served.key_file}}}" if served.key_file else _NO_KEY
    limit = {"context": served.context_length, "output": min(_MOST_OUTPUT, served.context_length // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "edgepipe",
        "options": {"baseURL": f"{served.base_url}/v1", "apiKey": key},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    content = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"edgepipe": provider},
        "model": f"edgepipe/{served.model}",
    }
    return Settings(file="opencode.json", content=json.dumps(content, indent=2), command="opencode")


def _aider(served: Served) -> Settings:
    name = f"openai/{served.model}"
    facts = {
        "max_input_tokens": served.context_length,
        "max_tokens": served.context_length,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return Settings(
        key_variable="OPENAI_API_KEY",
        variables={"OPENAI_API_BASE": f"{served.base_url}/v1"},
        file=".aider.model.metadata.json",
        content=json.dumps({name: facts}, indent=2),
        command=f"aider --model {shlex.quote(name)}",
    )


def _openai(served: Served) -> Settings:
    return Settings(key_variable="OPENAI_API_KEY", variables={"OPENAI_BASE_URL": f"{served.base_url}/v1"})


def _anthropic(served: Served) -> Settings:
    return Settings(
        unset=("ANTHROPIC_API_KEY",),
        key_variable="ANTHROPIC_AUTH_TOKEN",
        variables={"ANTHROPIC_BASE_URL": served.base_url},
    )


PROGRAMS: Mapping[str, Callable[[Served], Settings]] = {
    "codex": _codex,
    "claude": _claude,
    "opencode": _opencode,
    "aider": _aider,
    "openai": _openai,
    "anthropic": _anthropic,
}
"""Programs and client libraries, by the names that people type."""

FIRST_PROMPTS: Mapping[str, int] = {"codex": 10_000, "claude": 21_000}
"""Tokens of a program's first prompt: instructions and tools."""


def small_context(program: str, served: Served) -> str:
    """Return a warning for a context that is small for a coding agent, else an empty text."""
    if program in ("openai", "anthropic") or served.context_length >= SMALL_CONTEXT:
        return ""
    first = FIRST_PROMPTS.get(program)
    needs = f"the first prompt of {program} alone has about {first:,} tokens" if first else "agents send long prompts"
    return f"{served.model} is served with a context of {served.context_length:,} tokens; {needs}"
