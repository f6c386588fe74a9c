"""The official client libraries of OpenAI, Anthropic and Ollama against one ring of two real nodes.

Devices are emulated: equal prompts get equal tokens, and grammars bind them as they bind a model's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import ollama
import pytest
import pytest_asyncio
from pydantic import BaseModel

from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from tests.support.models.for_nodes import CONFIG
from tests.support.processes.nodes import Node, Nodes, idle, kv_is_free, until_answers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

OPENAI_CALLS = Path(__file__).parents[1] / "support" / "processes" / "openai_calls.py"
OLDER_OPENAI = Path("~/.cache/edgepipe-libraries/openai-2").expanduser()
CALLING = """{% if tools %}<tools>{{ tools|tojson }}</tools>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.reasoning_content }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}
</tool_call>
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"tiny": CALLING, "thinker": CALLING + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"}
"""Of the two models: one reasons. Random answers of a model that reasons may do so before a call, and never end it."""
SLOW = "time_factor=4"  # some 2 ms a step: a client can leave before the answer ends
USER: Any = [{"role": "user", "content": "Where is the moon?"}]
MANY = 400  # tokens: more than any JSON of the schemas has
BUDGET = 16  # tokens of reasoning


class Place(BaseModel):
    """A place."""

    city: Literal["Lima", "Oslo"]


LOOK: Any = {"name": "look", "description": "Look.", "input_schema": Place.model_json_schema()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """The second of two nodes that serve both models."""
    folder = tmp_path_factory.mktemp("ring")
    for name, template in TEMPLATES.items():
        write_model_folder(folder / name, CONFIG)
        settings = folder / name / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
        ModelStore(folder / "a" / "models").pull(str(folder / name))
    nodes = Nodes(folder=folder, cluster=f"test-{folder.name}")
    try:
        a, b = await asyncio.gather(*(nodes.start(name, backend_options=SLOW) for name in "ab"))
        await a.until(lambda status: idle(status, 2))
        await asyncio.gather(*(a.serve(name, plan="a:0-2,b:3-5") for name in TEMPLATES))
        await b.until(lambda status: [engine.state for engine in status.engines] == ["ready"] * len(TEMPLATES))
        await until_answers(b.http_port)
        yield b
    finally:
        await nodes.end()


def url_of(node: Node) -> str:
    return f"http://127.0.0.1:{node.http_port}"


@pytest.mark.parametrize("version", ["2", "3"])
async def test_openai(ring: Node, version: str) -> None:
    folder = OLDER_OPENAI if version == "2" else Path()
    if not folder.exists():
        pytest.skip(f"openai 2 is not installed (pip install --target {OLDER_OPENAI} 'openai<3')")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(OPENAI_CALLS), url_of(ring),
        env={**os.environ, "PYTHONPATH": str(OLDER_OPENAI) if version == "2" else ""},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    assert printed.decode().startswith(f"{version}.")


async def test_anthropic(ring: Node) -> None:
    async with anthropic.AsyncAnthropic(base_url=url_of(ring), auth_token="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": USER, "extra_body": {"temperature": 0}}
        assert {model.id async for model in client.models.list()} == TEMPLATES.keys()
        whole = await client.messages.create(max_tokens=12, **asked)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
        async with client.messages.stream(max_tokens=12, **asked) as stream:
            texts = [text async for text in stream.text_stream]
            gathered = await stream.get_final_message()
        assert "".join(texts) == gathered.content[0].to_dict()["text"] == whole.content[0].to_dict()["text"]

        tools: dict[str, Any] = {"tools": [LOOK], "tool_choice": {"type": "any"}}
        called = await client.messages.create(max_tokens=MANY, **tools, **asked)
        assert called.stop_reason == "tool_use"
        uses = [block for block in called.content if block.type == "tool_use"]
        assert all(Place.model_validate(use.input) for use in uses)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "here"} for use in uses]
        again: Any = [*USER, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
        after = await client.messages.create(**asked | {"messages": again}, max_tokens=4, **tools)
        assert after.usage.cache_read_input_tokens, "its prompt begins with that of the request before"

        thinking: Any = {"type": "enabled", "budget_tokens": BUDGET}
        thinker = asked | {"model": "thinker", "max_tokens": 60, "thinking": thinking}
        thought = await client.messages.create(**thinker)
        assert [block.type for block in thought.content] == ["thinking", "text"]
        async with client.messages.stream(**thinker) as stream:
            gathered = await stream.get_final_message()
        assert [block.type for block in gathered.content] == ["thinking", "text"]
        assert gathered.content[0] == thought.content[0]

        parsed = await client.messages.parse(max_tokens=MANY, output_format=Place, **asked)
        assert isinstance(parsed.parsed_output, Place)
        counted = await client.messages.count_tokens(model="tiny", messages=again, tools=[LOOK])
        assert counted.input_tokens == after.usage.input_tokens + after.usage.cache_read_input_tokens


async def test_ollama(ring: Node) -> None:
    async with ollama.AsyncClient(host=url_of(ring)) as client:
        exact: Any = {"temperature": 0, "num_predict": 12}
        assert {model.model for model in (await client.list()).models} == TEMPLATES.keys()
        assert (await client.show("thinker")).capabilities == ["completion", "tools", "thinking"]
        whole = await client.chat("tiny", messages=USER, options=exact)
        stream = await client.chat("tiny", messages=USER, options=exact, stream=True)
        parts = [part async for part in stream]
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert parts[-1].eval_count == whole.eval_count == 12
        assert (await client.generate("tiny", "hi", options=exact)).response
        thought = await client.chat("thinker", messages=USER, options=exact, think=True)
        assert thought.message.thinking
        many = exact | {"num_predict": MANY}
        formed = await client.chat("tiny", messages=USER, options=many, format=Place.model_json_schema())
        assert Place.model_validate_json(formed.message.content or "")


ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": USER, "max_tokens": 3000},
    "/v1/responses": {"input": "Where?", "max_output_tokens": 3000},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3000, "ignore_eos": True},
    "/api/chat": {"messages": USER},
}


@pytest.mark.parametrize("path", ASKED)
async def test_a_client_that_leaves_within_an_answer_holds_no_kv(ring: Node, path: str) -> None:
    async with httpx.AsyncClient(base_url=url_of(ring), trust_env=False, timeout=20, verify=False) as client:
        async with client.stream("POST", path, json={"model": "tiny", "stream": True} | ASKED[path]) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_raw())
    await ring.until(kv_is_free)
