"""What drafts bring to a lone chat: emulated pairs of machines, and the demo model on two stages of one thread.

``scripts/bench alone`` has these rows. ``scripts/alone_drafts.py`` measures them alone; parts can be named: ``emulated
chats real models``. Every factor is over the same build without drafts, in the same run.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from alone_models import model_rows
from bench_foundation import HALVES, stored_demo
from figures import Row, at_least, at_most
from local_nodes import Answer, complete, complete_at, running_nodes, settle
from parts import run_parts

from edgepipe.cli.bench.cluster import emulated_cluster
from edgepipe.cli.bench.run import serve_model
from edgepipe.cli.bench.verb import emulated_run
from edgepipe.cli.output import make_console
from edgepipe.link.admin_client import Admin

ROUNDS = 2
_TOKENS = 400  # length of an answer: windows find their size within some dozens
STATE_S = 1.0  # an engine tells its node of its counts a few times a second
_PROMPT = [11, 23, 5, 42, 8, 91, 17, 60] * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Emulated machines with a draft model, against the same without drafts."""

    name: str
    devices: str
    model: str
    draft: str  # share of right drafts, and the time of each
    target: float
    device: Mapping[str, str] = field(default_factory=dict[str, str])  # settings of the devices
    link: str = "1gbit,0.3ms"


# At 2, 4 and 8 rows an M3 Ultra takes 1.8, 3.3 and 6.1 times as long with 4-bit weights (MLX's issue 4265).
_ULTRA = {"tile_steps": "2:1.8,3:1.42,4:1.29,5:1.21,6:1.17,7:1.15,8:1.13"}
PAIRS = (
    Pair(
        name="2 x 4090, llama-3.3-70b, a .7, 3 ms",
        devices="2x rtx4090",
        model="llama-3.3-70b:q4_k_m",
        draft="0.7,3ms",
        target=2.0,
    ),
    Pair(
        name="2 x 4090, qwen3.6-35b-a3b, a .7, 0.5 ms",
        devices="2x rtx4090",
        model="qwen3.6-35b-a3b:q4_k_m",
        draft="0.7,0.5ms",
        target=1.45,
    ),
    Pair(
        name="4 x 4090, gpt-oss-120b, a .7, 0.5 ms",
        devices="4x rtx4090",
        model="gpt-oss-120b",
        draft="0.7,0.5ms",
        target=1.75,
    ),
    Pair(
        name="the same, each time five times as long",
        devices="4x rtx4090",
        model="gpt-oss-120b",
        draft="0.7,0.5ms",
        target=1.75,
        device={"time_factor": "5"},
        link="200mbit,1.5ms",
    ),
    Pair(
        name="2 x m3ultra with measured rows, llama-3.3-70b, a .5",
        devices="2x m3ultra",
        model="llama-3.3-70b:q4_k_m",
        draft="0.5,3ms",
        target=0.98,
        device=_ULTRA,
    ),
    Pair(
        name="2 x 4090, llama-3.3-70b, a .1, 3 ms",
        devices="2x rtx4090",
        model="llama-3.3-70b:q4_k_m",
        draft="0.1,3ms",
        target=0.98,
    ),
)


def _settings(pair: Pair, draft: str) -> dict[str, str]:
    return {
        "emulate": pair.devices,
        "as-model": pair.model,
        "link": pair.link,
        "jitter": "0",
        "context": "2048",
        "kv-tokens": "65536",
        "draft": draft,
    }


async def _answers(pair: Pair, draft: str, *, chats: int = 1) -> tuple[list[Answer], int]:
    """Let each chat have an answer, after one that warms up. Return the answers, and how many drafts they verified."""
    run = emulated_run(_settings(pair, draft))
    cluster = replace(run.cluster, settings={**run.cluster.settings, **pair.device})
    async with emulated_cluster(cluster) as admin:
        await serve_model(admin, run.serve)
        await complete_at(admin, [_PROMPT], max_tokens=30)
        await asyncio.to_thread(settle)
        before = await _drafted(admin)
        prompts = [[*_PROMPT, chat] for chat in range(chats)]
        answers = await complete_at(admin, prompts, max_tokens=_TOKENS)
        await asyncio.sleep(STATE_S)
        return answers, await _drafted(admin) - before


async def _drafted(admin: Admin) -> int:
    """Return how many drafts the engine of the one model served has verified."""
    (engine,) = (await admin.status()).engines
    return engine.drafts.drafted if engine.drafts is not None else 0


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all answers, from each one's first to its last token."""
    return sum((len(each.token_times_s) - 1) / (each.token_times_s[-1] - each.token_times_s[0]) for each in answers)


def pair_rows(full: bool) -> list[Row]:
    """Each pair of emulated machines, with and without drafts in turns."""
    rows: list[Row] = []
    for pair in PAIRS if full else PAIRS[:2]:
        rates: dict[str, list[float]] = {"off": [], pair.draft: []}
        verified = 0
        for _ in range(ROUNDS):
            for draft, found in rates.items():
                answers, verified = asyncio.run(_answers(pair, draft))
                found.append(_rate(answers))
        plain, drafted = (statistics.median(each) for each in rates.values())
        rows.append(at_least(pair.name, drafted, "tok/s", plain, "off", pair.target))
        rows.append(Row(f"  drafts verified for {_TOKENS} tokens", verified, "drafts"))
    return rows


def chat_rows(full: bool) -> list[Row]:
    """Sixteen chats, with and without drafts in turns: drafts must cost nothing where they cannot help."""
    pair = PAIRS[1]
    found: dict[str, list[list[Answer]]] = {"off": [], pair.draft: []}
    verified = 0
    for _ in range(ROUNDS):
        for draft, rounds in found.items():
            answers, verified = asyncio.run(_answers(pair, draft, chats=16))
            rounds.append(answers)
    plain, drafted = (statistics.median(map(_rate, rounds)) for rounds in found.values())
    gaps = [
        sorted(gap for answers in found[draft] for each in answers for gap in each.gaps_s)
        for draft in (pair.draft, "off")
    ]
    p99 = [values[int(0.99 * len(values))] * 1e3 for values in gaps]
    return [
        at_least("16 chats, 2 x 4090, qwen3.6-35b-a3b", drafted, "tok/s", plain, "off", 0.99),
        at_most("  ITL p99", p99[0], "ms", p99[1], "off", 1.05),
        Row(f"  drafts verified for {16 * _TOKENS} tokens", verified, "drafts"),
    ]


_SOURCE = """def read_table(path, separator=","):
    rows = []
    with open(path) as file:
        for line in file:
            fields = line.rstrip("\\\\n").split(separator)
            rows.append([field.strip() for field in fields])
    return rows


def write_table(path, rows, separator=","):
    with open(path, "w") as file:
        for row in rows:
            file.write(separator.join(row) + "\\\\n")
"""
_STORIES = ("a lighthouse", "two rivers", "an old clock", "the first snow", "a long train ride")
_NAMES = ("table", "sheet", "grid", "matrix", "list")


def _texts(kind: str) -> list[str]:
    if kind == "prose":
        return [f"Write a short story about {story}, {part}." for story in _STORIES for part in ("by night", "by day")]
    quotes = [f"Repeat this code exactly, without any change:\n{_SOURCE}\nThe code again:\n{_SOURCE[:60]}"] * 5
    edits = [f"Rename table to {name}.\nBefore:\n{_SOURCE}\nAfter:\n{_SOURCE[:20]}" for name in _NAMES]
    return quotes + edits


def real_rows(full: bool) -> list[Row]:
    """The demo model on two stages of one thread each: quotes and edits of code, and new prose."""
    model = stored_demo()
    tokenizer = model.tokenizer()
    rows: list[Row] = []
    with running_nodes(2, models_dir=model.path.parent, threads=1) as nodes:
        for kind, target in (("quotes and edits", 1.3), ("prose", 0.98)):
            prompts = [tokenizer.encode(text) for text in _texts(kind)[: None if full else 4]]
            rates = dict[str, float]()
            ids = dict[str, list[tuple[int, ...]]]()
            for draft in ("off", "lookup"):
                nodes[0].edgepipe("serve", "demo", "--plan", HALVES, "--context", "2048", "--draft", draft)
                complete(nodes[0], prompts[:1], max_tokens=16)
                settle()
                answers = [complete(nodes[0], [prompt], max_tokens=120)[0] for prompt in prompts]
                rates[draft], ids[draft] = _rate(answers) / len(answers), [each.token_ids for each in answers]
                nodes[0].edgepipe("stop", "demo")
            rows.append(at_least(f"demo, {kind}", rates["lookup"], "tok/s", rates["off"], "off", target))
            same = sum(a == b for a, b in zip(ids["off"], ids["lookup"], strict=True))
            rows.append(Row("  equal answers", same, "answers", len(prompts), "all"))
    return rows


if __name__ == "__main__":
    make_console(stderr=True).print(
        "predictions: 2.1x, 1.5x, 1.8x, 2.0x, 1.0x, 1.0x; 16 chats 1.0x; quotes 1.5x, prose 1.0x"
    )
    parts = {"emulated": pair_rows, "chats": chat_rows, "real": real_rows, "models": model_rows}
    run_parts("drafts for one chat", parts)
