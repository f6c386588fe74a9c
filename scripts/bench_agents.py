"""Coding agents: how much of a prompt stays cached from turn to turn, and what the gateway costs them.

Run as ``scripts/bench agents [TEMPLATES]``. TEMPLATES: a folder of chat templates (``*.jinja``), for the cached shares.
The chats are recorded ones of Codex, Claude Code and OpenCode (``tests/data/clients/chats``).
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
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from figures import Row, at_most, below, print_rows

from edgepipe.cli.bench.cluster import EmulatedCluster, emulated_cluster
from edgepipe.cli.bench.run import serve_model
from edgepipe.gateway.formats.chat_format import Reasoning
from edgepipe.shapes.loader import named_shape
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRequest
from tests.support.gateways.agent_chats import SCRIPT, AgentChat, recorded_chats
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.family_assets import FamilyAssets
from tests.support.gateways.model_outputs import Family, Turn, same_text
from tests.support.gateways.server import serving

Turns = Sequence[Mapping[str, Any]]
MODEL = "qwen2.5-14b"
LEAST_SHARE = 0.98
MOST_TTFT = 0.15
MOST_PER_TOKEN = 1.2
LONG_TOKENS = 12_000
PLAN = "a:0-23,b:24-47"  # half of the layers each: a placement by measured speeds may leave too little KV
CHATS = 1_000
STREAMED = 3_000  # tokens of one answer
SAME, REWRITTEN, CHANGED = "same", "rewritten", "changed"  # what becomes of a turn of the model
TOOL = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


async def template_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the cached shares of recorded chats with each template, and the turns that render back, by format."""
    rows: list[Row] = []
    back: dict[str, list[str]] = {}
    for path in paths:
        source = path.read_text(encoding="utf-8").removeprefix("\ufeff")
        family = Family(source)
        for chat in recorded_chats():
            assets = SeenTurns(source)
            prompts = await chat.prompts(assets)
            rows.append(share_row(f"{path.stem}, {chat.name}", prompts, assets.seen))
            back.setdefault(family.chat.name, []).extend(rendered_back(family, chat, prompts, assets.seen))
    return [*rows, *itertools.starmap(back_row, sorted(back.items()))]


def back_row(name: str, turns: Sequence[str]) -> Row:
    """Return the share of a format's turns that render back, of those whose template keeps the turns before."""
    kept = len(turns) - turns.count(REWRITTEN)
    label = f"the model's turns that render back, of {kept}: {name}"
    more = f" (before {len(turns) - kept} others the template writes turns otherwise)" if kept < len(turns) else ""
    share = turns.count(SAME) / kept
    return Row(label + more, share, "", target=f">= {LEAST_SHARE}", met=share >= LEAST_SHARE)


class SeenTurns(FamilyAssets):
    """A family's template, and the turns that it got for each prompt."""

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.seen: list[Turns] = []

    async def render(self, messages: Sequence[Mapping[str, Any]], *, owner: str = "", **keywords: Any) -> str:
        self.seen.append(list(messages))
        return await super().render(messages, owner=owner, **keywords)


def share_row(name: str, prompts: Sequence[str], seen: Sequence[Turns]) -> Row:
    """Return the least share of an earlier prompt that the next one begins with.

    Where each prompt had the turns of the one before, a template that writes these otherwise is a reason for less.
    """
    least = min(common(earlier, later) / len(earlier) for earlier, later in itertools.pairwise(prompts))
    label = f"cached share of the earlier prompt, turns 2-{len(prompts)}, least: {name}"
    if least < LEAST_SHARE and all(itertools.starmap(continues, itertools.pairwise(seen))):
        return Row(f"{label} (the template writes earlier turns otherwise)", least, "")
    return Row(label, least, "", target=f">= {LEAST_SHARE}", met=least >= LEAST_SHARE)


def continues(earlier: Turns, later: Turns) -> bool:
    """Return whether turns begin with those of an earlier request. Text may be added to the last one of these."""
    *before, last = earlier
    same = later[len(before)]
    longer = str(same["content"]).startswith(str(last["content"])) and {**same, "content": last["content"]} == last
    return list(later[: len(before)]) == before and longer


def rendered_back(family: Family, chat: AgentChat, prompts: Sequence[str], seen: Sequence[Turns]) -> list[str]:
    """Return what became of each turn of the model in the next prompt, against what the model of this family wrote."""
    found: list[str] = []
    pairs = zip(itertools.pairwise(prompts), itertools.pairwise(seen), strict=True)
    for said, ((earlier, later), turns) in zip(itertools.chain(*SCRIPT), pairs, strict=False):
        turn = Turn(content=said.text, reasoning=said.thought, calls=said.calls(chat.name))
        meant = family.written(turn, is_last=not turn.calls).text
        try:
            back, inside = family.continued(earlier, later)
        except ValueError:
            found.append(REWRITTEN if continues(*turns) else CHANGED)
            continue
        if inside and family.chat.reasoning is not None:  # the prompt has the opening already
            meant = without_opening(meant, family.chat.reasoning)
        found.append(SAME if same_text(back, meant) else CHANGED)
        if found[-1] == CHANGED:
            say(f"{family.chat.name}, {chat.name}: {meant!r} comes back as {back!r}")
    return found


def without_opening(text: str, marks: Reasoning) -> str:
    """Return a turn without the mark that opens its reasoning."""
    return text.lstrip().removeprefix(marks.opening).lstrip().removeprefix(marks.label)


def common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])


async def ring_rows() -> list[Row]:
    """Return the times to the first token of two turns of a long chat, on two emulated nodes."""
    cluster = EmulatedCluster(
        devices=["rtx4090", "rtx4090"], model=MODEL, config=named_shape(MODEL), link="1gbit,0.3ms"
    )
    async with emulated_cluster(cluster) as admin:
        status = await admin.status()
        port = next(member.node.http_port for member in status.members if member.self)
        await serve_model(admin, ServeRequest(options=ServeSpec(model=MODEL), plan=PLAN))
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
        if answer.is_error:
            sys.exit(f"{answer.status_code}: {(await answer.aread()).decode()}")
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
    rows = asyncio.run(template_rows(sorted(Path(sys.argv[1]).glob("*.jinja")))) if sys.argv[1:] else []
    rows += asyncio.run(gateway_rows())
    rows += asyncio.run(ring_rows())
    print_rows("agents", rows)
    sys.exit(any(row.met is False for row in rows))


if __name__ == "__main__":
    main()
