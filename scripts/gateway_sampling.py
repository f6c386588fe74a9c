"""The sampler's figures for ``scripts/bench gateway``: parts ``sampler``, ``cycle`` and ``grammar``."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_foundation import stored_demo
from figures import Row, at_least, at_most, below
from local_nodes import Answer, Node, complete, complete_at, decode_rate, running_nodes

from edgepipe.cli.admin import Admin, connect
from edgepipe.cli.bench.cluster import EmulatedCluster, emulated_cluster
from edgepipe.cli.bench.run import serve_model
from edgepipe.sampling import SampleRow, SamplingParams, SequenceSampler, sample
from edgepipe.sampling.grammar import check_grammar, json_grammar
from edgepipe.shapes.loader import named_shape
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRequest
from tests.support.sampling_columns import ColumnSampler

V = 152_064  # Qwen2.5's vocabulary
BATCH = 64
KNOWN = 512  # tokens of each prompt and of each output so far
FULL = SamplingParams(
    temperature=0.8, top_p=0.95, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1, seed=7
)
GREEDY = SamplingParams(temperature=0.0)

Step = Callable[[npt.NDArray[np.float32], int], Sequence[int]]


async def sampler_rows(full: bool) -> list[Row]:
    """One thread, batch 64, all penalties and top-p: state that is kept, in rows and columns, against a rebuild."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, V, (BATCH, KNOWN)).tolist()
    outputs = rng.integers(0, V, (BATCH, KNOWN)).tolist()
    steps = 12 if full else 6
    ways: dict[str, Step] = {
        "rebuild": Rebuild(prompts, outputs),
        "rows": _kept(sample, prompts, outputs),
        "columns": _kept(ColumnSampler(vocab_size=V, batch=BATCH), prompts, outputs),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, list[list[int]]] = {name: [] for name in ways}
    for step in range(steps + 1):
        logits = speech_like(rng)
        for name, way in ways.items():
            mine = logits.copy()
            begun_s = time.perf_counter()
            tokens[name].append(list(way(mine, KNOWN + step)))
            times[name].append(time.perf_counter() - begun_s)
    for name in ("rows", "columns"):
        same = np.mean(np.array(tokens[name][1]) == np.array(tokens["rebuild"][1]))
        if same < 0.95:  # float32 sums in another order move a draw at a boundary now and then
            raise RuntimeError(f"{name} chose other tokens than the rebuild: {same:.0%} are the same")
    ms = {name: statistics.median(taken[1:]) * 1e3 for name, taken in times.items()}
    return [
        at_least(
            "sampler, steps per second, rows", 1e3 / ms["rows"], "/s", 1e3 / ms["rebuild"], "a rebuild per step", 5.0
        ),
        Row(
            "  columns",
            1e3 / ms["columns"],
            "/s",
            1e3 / ms["rebuild"],
            "a rebuild per step",
            ms["rebuild"] / ms["columns"],
        ),
        *[Row(f"  {name}, a step of {BATCH} rows", ms[name], "ms") for name in ways],
        *[Row(f"  {name}, a row", ms[name] / BATCH, "ms") for name in ways],
    ]


def speech_like(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """``[B, V]``: a broad bulk of unlikely words and some forty that may come, as a language model's logits look."""
    logits = rng.standard_normal((BATCH, V), np.float32) * np.float32(2.5)
    places = rng.integers(0, V, (BATCH, 40))
    np.put_along_axis(logits, places, rng.uniform(8, 20, (BATCH, 40)).astype(np.float32), axis=1)
    return logits


def _kept(way: Callable[..., Any], prompts: list[list[int]], outputs: list[list[int]]) -> Step:
    sequences = [
        SequenceSampler(FULL, choice=index, prompt=prompt, generated=output)
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]

    def step(logits: npt.NDArray[np.float32], position: int) -> list[int]:
        return [each.token for each in way(logits, [SampleRow(sequence, position) for sequence in sequences])]

    return step


class Rebuild:
    """The straightforward way: dense penalties made from all tokens, a sort and a softmax of everything, every step."""

    def __init__(self, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        self._prompts = prompts
        self._outputs = [list(output) for output in outputs]
        self._draws = SequenceSampler(FULL)

    def __call__(self, logits: npt.NDArray[np.float32], position: int) -> list[int]:
        counts = np.stack([np.bincount(output, minlength=V) for output in self._outputs]).astype(np.float32)
        seen = np.stack([np.bincount(prompt, minlength=V) for prompt in self._prompts]) + counts > 0
        factors = np.where(seen, np.float32(FULL.repetition_penalty), np.float32(1))
        logits = np.where(logits > 0, logits / factors, logits * factors)
        logits -= np.float32(FULL.frequency_penalty) * counts + np.float32(FULL.presence_penalty) * (counts > 0)
        logits /= np.float32(FULL.temperature)
        order = np.argsort(-logits, axis=1)
        ranked = np.take_along_axis(logits, order, axis=1)
        shares = np.exp(ranked - ranked[:, :1])
        shares /= shares.sum(axis=1, keepdims=True)
        reached = np.cumsum(shares, axis=1)
        kept = reached - shares < FULL.top_p
        reached = np.cumsum(np.where(kept, shares, 0), axis=1)
        draws = [SequenceSampler(FULL, choice=index).uniform(position) for index in range(len(logits))]
        places = (reached <= np.array(draws)[:, None] * reached[:, -1:]).sum(axis=1)
        tokens = np.take_along_axis(order, places[:, None], axis=1)[:, 0].tolist()
        for output, token in zip(self._outputs, tokens, strict=True):
            output.append(token)
        return tokens


async def cycle_rows(full: bool) -> list[Row]:
    """Two emulated stages, four micro-batches of 16: what sampling costs the ring. SmolLM2 with both cores busy."""
    model = "qwen2.5-14b"
    cluster = EmulatedCluster(devices=("rtx4090", "rtx4090"), model=model, config=named_shape(model), vocab_size=V)
    async with emulated_cluster(cluster) as admin:
        options = ServeSpec(model=model, micro_batches=4)
        request = ServeRequest(model=model, num_nodes=2, options=options)
        await serve_model(admin, request)
        prompts = [[(7 * i + 13 * j) % 250 for j in range(32)] for i in range(64)]
        rates = await _alternate(admin, prompts, rounds=5 if full else 3, max_tokens=96)
    rows = _cycle("last stage's cycle, 16 rows, vocabulary 152k, emulated", rates, batch=16, target=1.05)
    return rows + await asyncio.to_thread(_real_cycle, full)


async def _alternate(admin: Admin, prompts: list[list[int]], *, rounds: int, max_tokens: int) -> dict[str, list[float]]:
    """Tokens per second, greedy and full in turn."""
    rates: dict[str, list[float]] = {"greedy": [], "full": []}
    for _ in range(rounds):
        for name, params in (("greedy", GREEDY), ("full", FULL)):
            rates[name].append(decode_rate(await complete_at(admin, prompts, max_tokens=max_tokens, sampling=params)))
    return rates


async def _alternate_on(data_dir: Path, prompts: list[list[int]], *, rounds: int) -> dict[str, list[float]]:
    async with connect(data_dir) as admin:
        return await _alternate(admin, prompts, rounds=rounds, max_tokens=32)


def _cycle(name: str, rates: dict[str, list[float]], *, batch: int, target: float | None) -> list[Row]:
    cycles = {kind: batch / statistics.median(found) * 1e3 for kind, found in rates.items()}
    if target is not None:
        return [at_most(name, cycles["full"], "ms", cycles["greedy"], "greedy", target)]
    return [Row(name, cycles["full"], "ms", cycles["greedy"], "greedy", cycles["full"] / cycles["greedy"])]


def _real_cycle(full: bool) -> list[Row]:
    model = stored_demo()
    prompts = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(24)] for i in range(32)]
    with running_nodes(2, models_dir=model.path.parent, threads=1) as nodes:
        nodes[0].edgepipe("serve", "demo", "--context", "2048", "--plan", "n0:0-14,n1:15-29", "--micro-batches", "2")
        complete(nodes[0], prompts, max_tokens=8)
        rates = asyncio.run(_alternate_on(nodes[0].data_dir, prompts, rounds=3 if full else 2))
    return _cycle("  SmolLM2 on two one-core stages, 16 rows", rates, batch=16, target=None)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Rome", "Oslo", "Lima", "Cairo"]},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}


async def grammar_rows(full: bool) -> list[Row]:
    """SmolLM2 bound to a schema: every answer is JSON that fits, and how much longer its tokens take."""
    return await asyncio.to_thread(_grammar_rows, full)


def _grammar_rows(full: bool) -> list[Row]:
    model = stored_demo()
    tokenizer, end_ids = model.tokenizer(), set(model.config.eos_token_ids)
    count, at_once, rounds = (200, 16, 3) if full else (32, 16, 2)
    grammar = json_grammar(PERSON)
    check_grammar(grammar)
    bound, free = SamplingParams(temperature=0.8, seed=1, grammar=grammar), SamplingParams(temperature=0.8, seed=1)
    prompts = [tokenizer.encode(_question(index), add_special=False) for index in range(count)]
    with running_nodes(1, models_dir=model.path.parent, threads=1) as nodes:
        nodes[0].edgepipe("serve", "demo", "--context", "2048")
        complete(nodes[0], prompts[:at_once], max_tokens=8, sampling=bound)
        gaps = _gaps(nodes[0], prompts[:at_once], {"bound": bound, "free": free}, rounds=rounds)
        found = complete(nodes[0], prompts, max_tokens=160, sampling=bound, ignore_eos=False, at_once=at_once)
    valid = sum(_fits(tokenizer.decode([i for i in answer.token_ids if i not in end_ids])) for answer in found)
    itl_ms = {kind: statistics.median(some) * 1e3 for kind, some in gaps.items()}
    return [
        below(f"schema-bound answers of {count} that are no valid JSON", count - valid, "", 0),
        at_most(f"  ITL p50, {at_once} at once", itl_ms["bound"], "ms", itl_ms["free"], "unbound", 1.15),
    ]


_BOUND_TOKENS = 28  # few answers are complete before


def _gaps(
    node: Node, prompts: Sequence[list[int]], kinds: dict[str, SamplingParams], *, rounds: int
) -> dict[str, list[float]]:
    """Of each kind, in turn, all at once and all of one length: the same work but for the grammar."""
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind, sampling in kinds.items():
            wanted = replace(sampling, seed=1000 * turn + 1)
            gaps[kind] += _together(complete(node, prompts, max_tokens=_BOUND_TOKENS, sampling=wanted))
    return gaps


def _together(answers: Sequence[Answer]) -> list[float]:
    """Gaps while all were decoding: later ones have fewer beside them."""
    until_s = min(answer.token_times_s[-1] for answer in answers)
    since_s = max(answer.token_times_s[0] for answer in answers)
    return [
        b - a
        for answer in answers
        for a, b in zip(answer.token_times_s, answer.token_times_s[1:], strict=False)
        if since_s <= a and b <= until_s
    ]


def _question(index: int) -> str:
    names = ("a baker", "a pilot", "an old sailor", "a nurse", "a student", "a farmer", "a painter", "a judge")
    text = f"Describe {names[index % 8]} number {index} as JSON with name, age, city and hobbies."
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def _fits(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        set(value) == set(PERSON["required"])
        and isinstance(value["name"], str)
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 120
        and value["city"] in ("Rome", "Oslo", "Lima", "Cairo")
        and 1 <= len(value["hobbies"]) <= 3
    )
