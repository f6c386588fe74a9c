"""Requests as programs send them that are too large for these tests: the fields and headers that they are known for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.formats.detect import detect_format
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving
from tests.support.gateways.template_traits import TURNS, traits_of

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
PARTS: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
OPENAI, OLLAMA, GENERATE = "/v1/chat/completions", "/api/chat", "/api/generate"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHROME = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/138.0.0.0 Electron/37.6.0 Safari/537.36"

REQUESTS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Open WebUI": (
        OPENAI,
        {"messages": SYSTEM + USER, "stream": True, "chat_id": "0-1", "session_id": "s", "id": "m", "metadata": {}}
        | {"reasoning_effort": "medium", "features": {"web_search": False}, "background_tasks": {}, "user": "u"},
        {"x-openwebui-user-name": "Ann"},
    ),
    "Open WebUI, Ollama": (
        OLLAMA,
        {"messages": USER, "stream": True, "think": False, "keep_alive": "5m", "metadata": {}}
        | {"options": {"num_ctx": 8192, "num_keep": 24, "repeat_last_n": 64, "mirostat": 0, "num_gpu": 99, "stop": []}},
        {},
    ),
    "Continue": (
        OPENAI,
        {"messages": PARTS, "max_tokens": 64, "stop": ["<|im_end|>", "```"], "temperature": 0.01} | STREAM,
        {},
    ),
    "Continue, completions": (
        GENERATE,
        {"prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "raw": True, "stream": True, "keep_alive": 1800}
        | {"options": {"num_predict": 64, "num_ctx": 4096, "temperature": 0.01, "stop": ["<|endoftext|>"]}},
        {},
    ),
    "Cline": (
        OPENAI,
        {"messages": SYSTEM + PARTS, "temperature": 0, "reasoning_effort": "low", "max_tokens": -1} | STREAM,
        {"user-agent": "Cline/3.0"},
    ),
    "Zed": (
        OPENAI,
        {"messages": SYSTEM + PARTS, "max_completion_tokens": 64, "temperature": 1.0, "tools": [TOOL], "stop": []}
        | {"tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "k"}
        | STREAM,
        {"user-agent": "Zed/0.200.0"},
    ),
    "Zed, Ollama": (
        OLLAMA,
        {"messages": USER, "stream": True, "keep_alive": -1, "think": True, "tools": [TOOL]}
        | {"options": {"num_ctx": 16384, "stop": [], "temperature": 1.0}},
        {},
    ),
    "aider": (
        OPENAI,
        {"messages": SYSTEM + USER, "stream": True, "temperature": 0},
        {"http-referer": "https://aider.chat", "x-title": "Aider"},
    ),
    "LibreChat": (
        OPENAI,
        {"messages": USER, "stream": True, "user": "64b", "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
        | {"include_reasoning": True, "stream_options": {"include_usage": True}},
        {},
    ),
    "n8n": (
        OPENAI,
        {"messages": USER, "temperature": 0.7, "n": 1, "stream": False, "tools": [TOOL], "top_p": 1}
        | {"response_format": {"type": "text"}, "parallel_tool_calls": True},
        {"x-stainless-lang": "js"},
    ),
    "Home Assistant": (
        OLLAMA,
        {"messages": SYSTEM + USER, "stream": True, "keep_alive": "-1s", "think": False, "tools": [TOOL]}
        | {"options": {"num_ctx": 8192}},
        {},
    ),
    "Home Assistant, AI task": (
        OLLAMA,
        {"messages": USER, "stream": True, "format": SCHEMA, "keep_alive": "-1s", "options": {"num_ctx": 8192}},
        {},
    ),
    "Jan": (
        OPENAI,
        {"messages": SYSTEM + USER, "top_k": 40, "top_p": 0.95, "temperature": 0.7, "repeat_penalty": 1.0}
        | {"presence_penalty": 0, "tools": []}
        | STREAM,
        {"origin": "http://tauri.localhost"},
    ),
    "Cherry Studio": (
        OPENAI,
        {"messages": SYSTEM + USER, "enable_thinking": True, "thinking_budget": 4096, "temperature": 0.7} | STREAM,
        {"user-agent": CHROME, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "x-title": "Cherry Studio"},
    ),
    "Dify": (
        OPENAI,
        {"messages": USER, "stream": True, "enable_thinking": False, "thinking_budget": 512, "user": "u"},
        {},
    ),
    "Obsidian": (OPENAI, {"messages": USER, "stream": True, "max_tokens": 64}, {"origin": "app://obsidian.md"}),
}


class ThinkingAssets(ByteAssets):
    """A model that reasons."""

    traits = traits_of("{% if enable_thinking %}<think>{% endif %}</think>{{ tools }}" + TURNS)
    chat = detect_format("{% if enable_thinking %}<think>{% endif %}</think>{{ tools }}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    rules = AccessRules.of(origins=("app://obsidian.md", "http://tauri.localhost"))
    async with serving(FakeEngine(group=8), load=lambda path: ThinkingAssets(), rules=rules) as value:
        yield value


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("program", REQUESTS)
async def test_a_program_gets_its_answer(served: Served, program: str) -> None:
    path, body, headers = REQUESTS[program]
    response = await served.http.post(path, json={"model": "tiny"} | body, headers=headers)
    assert response.status_code == 200, response.text
    assert "Paris" in response.text.replace('"', "") or "capital" in response.text
    if "origin" in headers:
        assert response.headers["access-control-allow-origin"] == headers["origin"]
