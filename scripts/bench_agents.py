"""Coding agents: how much of a prompt stays cached from turn to turn, and what the gateway costs them.

Run as ``scripts/bench agents [TEMPLATES]``. TEMPLATES: a folder of chat templates (``*.jinja``), for the cached shares.
Needs no GPU: nodes, engine and gateway are real processes, only the devices' arithmetic is emulated.

Predictions, written before the first run:

- Cached share, turns 2 to 10: 1.00 for Qwen 3.5, gpt-oss and Gemma, which moved late turns of the system to the front
  before; 0.98 or more for the others. Below it where a template drops the reasoning of earlier turns.
- Time to first token, turn 2 over turn 1, 12,000 tokens: below 0.15, since 98 % of the prompt is cached.
- Time per token of Messages over chat: 1.0 to 1.1; both write one event for each token.
- ``count_tokens`` equals the usage of the answer in all of 1,000 chats: both render the same prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from figures import Row, at_most, below, print_rows

from edgepipe.cli.bench.cluster import EmulatedCluster, emulated_cluster
from edgepipe.cli.bench.run import serve_model
from edgepipe.gateway.conversation import client_turns, wording
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.protocols.anthropic.body import CountBody
from edgepipe.gateway.schema import validate
from edgepipe.shapes.loader import named_shape
from edgepipe.text.conversations.efforts import keywords_of
from edgepipe.text.conversations.fitting import fit
from edgepipe.text.conversations.learning_child import Renderer, learned
from edgepipe.text.template_child import make_environment
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRequest
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import serving

MODEL = "qwen2.5-14b"
TURNS = 10
LEAST_SHARE = 0.98
MOST_TTFT = 0.15
MOST_PER_TOKEN = 1.2
LONG_TOKENS = 12_000
CHATS = 1_000
STREAMED = 3_000  # tokens of one answer
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def agent_bodies() -> list[dict[str, Any]]:
    """Return the requests of a chat as Claude Code sends them: two calls a turn, whose results come in reverse order,

    a turn of the system after the first question, and after every third turn.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the fault."}]
    messages.append({"role": "system", "content": "Agents: " + "a general one. " * 20})
    bodies: list[dict[str, Any]] = []
    for turn in range(TURNS):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: hash={turn};"}]
        system.append({"type": "text", "text": "You are an agent. " * 600})
        bodies.append({"messages": list(messages), "system": system, "tools": [TOOL]})
        calls = [
            {"type": "tool_use", "id": f"call_{turn}_{each}", "name": "Bash", "input": {"command": f"grep -n {each}"}}
            for each in range(2)
        ]
        thought = {"type": "thinking", "thinking": f"Turn {turn}: I search twice.", "signature": "x"}
        messages.append({"role": "assistant", "content": [thought, *calls]})
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"line {turn} " * 40} for call in calls[::-1]
        ]
        messages.append({"role": "user", "content": results})
        if turn % 3 == 2:
            messages.append({"role": "system", "content": "The list of tasks is empty."})
    return bodies


def share_rows(folder: Path) -> list[Row]:
    """Return the least share of the earlier prompt that the next one begins with, for each template."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8").removeprefix("\ufeff")
        template = make_environment().from_string(source)
        traits = learned(Renderer(template, TOKENS), tools=True)
        prompts: list[str] = []
        for body in agent_bodies():
            chat = validate(CountBody, body).chat()
            tools = [{"type": "function", "function": TOOL | {"parameters": TOOL["input_schema"]}}]
            fitted = fit(
                client_turns(chat.messages), tools=tools, traits=traits, wording=wording(detect_format(source))
            )
            variables = keywords_of({}, None, traits) | TOKENS | {"tools": list(fitted.tools) or None}
            prompts.append(template.render(messages=fitted.turns, add_generation_prompt=True, **variables))
        shares = [common(earlier, later) / len(earlier) for earlier, later in itertools.pairwise(prompts)]
        least = min(shares)
        rows.append(
            Row(
                f"cached share of the earlier prompt, turns 2-{TURNS}, least: {path.stem}",
                least,
                "",
                target=f">= {LEAST_SHARE}",
                met=least >= LEAST_SHARE,
            )
        )
    return rows


def common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def ring_rows() -> list[Row]:
    """Return the times to the first token of two turns of a long chat, on two emulated nodes."""
    cluster = EmulatedCluster(
        devices=["rtx4090", "rtx4090"], model=MODEL, config=named_shape(MODEL), link="1gbit,0.3ms"
    )
    async with emulated_cluster(cluster) as admin:
        status = await admin.status()
        port = next(member.node.http_port for member in status.members if member.self)
        await serve_model(admin, ServeRequest(options=ServeSpec(model=MODEL, num_nodes=2)))
        firsts: list[float] = []
        seconds: list[float] = []
        cached: list[int] = []
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120) as http:
            for chat in range(4):
                question = f"chat {chat}: " + "read this. " * (LONG_TOKENS // 11)
                messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
                first = await first_token(http, messages)
                messages += [{"role": "assistant", "content": first[1]}, {"role": "user", "content": "Go on."}]
                second = await first_token(http, messages)
                if chat:  # the first one warms up
                    firsts.append(first[0])
                    seconds.append(second[0])
                    cached.append(second[2])
                say(f"chat {chat}: {first[0]:.2f} s, then {second[0]:.2f} s with {second[2]} tokens cached")
    return [
        at_most(
            f"TTFT of turn 2, {LONG_TOKENS} tokens",
            statistics.median(seconds),
            "s",
            statistics.median(firsts),
            "of turn 1",
            MOST_TTFT,
        ),
        Row("  tokens of turn 2 that were cached", statistics.median(cached), "tokens"),
    ]


async def first_token(http: httpx.AsyncClient, messages: Sequence[dict[str, Any]]) -> tuple[float, str, int]:
    """Return the time to the first piece of the answer (s), the answer, and the cached tokens of the prompt."""
    body = {"model": MODEL, "max_tokens": 24, "messages": list(messages), "stream": True}
    began_s, first_s, texts, cached = time.monotonic(), 0.0, list[str](), 0
    async with http.stream("POST", "/v1/messages", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "content_block_delta":
                first_s = first_s or time.monotonic()
                texts.append(event["delta"].get("text", ""))
            elif event["type"] == "message_delta":
                cached = event["usage"]["cache_read_input_tokens"]
    return (first_s or time.monotonic()) - began_s, "".join(texts) or "Yes.", cached


async def gateway_rows() -> list[Row]:
    """Return the time per token of each API, and how often counted tokens are those of the answer's usage."""
    user = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user},
        "/v1/messages": {"messages": user, "max_tokens": STREAMED + 9},
        "/v1/responses": {"input": "hi", "store": False},
    }
    times: dict[str, list[float]] = {path: [] for path in bodies}
    async with serving(FakeEngine(answer=b"x" * STREAMED)) as served:
        for turn in range(6):
            for path, body in bodies.items():
                began_s = time.process_time()
                async with served.http.stream("POST", path, json=body | {"stream": True}, timeout=60) as answer:
                    answer.raise_for_status()
                    async for _ in answer.aiter_raw():
                        pass
                if turn:  # the first one warms up
                    times[path].append((time.process_time() - began_s) / STREAMED * 1e6)
    each = {path: statistics.median(values) for path, values in times.items()}
    rows = [
        at_most(
            f"CPU per streamed token, engine and client included: {path}",
            each[path],
            "us",
            each["/v1/chat/completions"],
            "chat",
            MOST_PER_TOKEN,
        )
        for path in ("/v1/messages", "/v1/responses")
    ]
    return [*rows, below(f"count_tokens differs from usage, of {CHATS} random chats", await differing(), "", 0)]


async def differing() -> int:
    """Return the number of random chats whose counted tokens are not those of the answer's usage."""
    rng, wrong = random.Random(7), 0
    async with serving(FakeEngine(answer=b"ok", group=8)) as served:
        for _ in range(CHATS):
            body = random_chat(rng)
            counted = await served.http.post("/v1/messages/count_tokens", json=body)
            answered = await served.http.post("/v1/messages", json=body | {"max_tokens": 4})
            answered.raise_for_status()
            usage = answered.json()["usage"]
            wrong += counted.json()["input_tokens"] != usage["input_tokens"] + usage["cache_read_input_tokens"]
    return wrong


def random_chat(rng: random.Random) -> dict[str, Any]:
    """Return a chat of any turns, with or without instructions, tools and calls."""

    def text() -> str:
        return "".join(rng.choices("abc déñ{}<>\n", k=rng.randint(1, 60)))

    messages: list[dict[str, Any]] = []
    for turn in range(rng.randint(1, 5)):
        messages.append({"role": "user", "content": [{"type": "text", "text": text()} for _ in range(2)]})
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": text()})
        call = {"type": "tool_use", "id": f"c{turn}", "name": "Bash", "input": {"command": text()}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text()}, call]})
        result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": text()}
        messages.append({"role": "user", "content": [result]})
    body: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.5:
        body["system"] = text()
    return body | ({"tools": [TOOL]} if rng.random() < 0.5 else {})


def main() -> None:
    """Measure and print one table."""
    folders = [Path(word) for word in sys.argv[1:]]
    rows = [row for folder in folders for row in share_rows(folder)]
    rows += asyncio.run(gateway_rows())
    rows += asyncio.run(ring_rows())
    print_rows("agents", rows)
    sys.exit(any(row.met is False for row in rows))


if __name__ == "__main__":
    main()
