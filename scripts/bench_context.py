"""Long conversations: what host memory below the device saves and costs.

    scripts/bench context [--full] [PART ...]

Parts: ``fits``     ``plan`` with the contexts that users of one or two cards ask for
       ``second``   the second turn of a conversation that lay in host memory, and of one that lay on disk, against
                    reading it again: an emulated 32B on two cards
       ``turns``    12 users with long conversations that take turns on a device that holds 3 of them: the same 32B; the
                    turns of 4 of them, or of all with ``--full``
       ``beside``   what copies add to the steps of chats that decode, while conversations come from host memory or disk
                    and new ones push others out: the same 32B
       ``demo``     the demo model on this CPU, real: pushed out by other chats, then continued; the ids must be equal
       ``quality``  what 8 and 4 bits of KV do to the demo model's predictions, over 1,024 tokens, or
                    4,096 with ``--full``; only if named
       ``facts``    which of ten facts in 1,024 tokens the demo model finds again with each form of KV, or in 4,096
                    and 8,000 with ``--full``; only if named
       ``rival``    users who take turns with the demo model on this CPU, one thread, beside llama.cpp's server with
                    ``--cache-ram`` (EP_LLAMA_CPP: the folder of ``scripts/build_llama_cpp FOLDER server``); only if
                    named
       ``decode``   decode steps of the demo model behind 8,192 tokens, one thread of this CPU; only if named
       ``overhead`` tokens per second of processor time while nothing is pushed out, with and without host memory

The emulated cards take their real time, and copy at 24 GB/s (PCIe 4 x16). Their disks read and write 3 GB/s.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_foundation import stored_demo
from edgepipe_emulated import EmulatedBackend, emulated_model_config
from figures import ROOT, Row, at_least, at_most, below
from kv_beside import CHATS, NEW, VISIT, Gaps, gaps_beside_copies
from kv_quality import FACTS, FORMS, facts_found, hybrid_qualities, qualities
from kv_speed import decode_times
from llama_server import llama_server
from local_nodes import Node, complete, running_nodes, settle
from parts import Part, run_parts

from edgepipe.backend.types import BackendOptions
from edgepipe.store.quantise import REFERENCE_TEXT
from edgepipe.store.store import StoredModel
from tests.support.engine.lab import FakeGateway, engine_lab, submission

BLOCK = 16  # tokens
AS_MODEL, DEVICE, LAYERS = "qwen2.5-32b:q4_k_m", "rtx4090", 64
LONG = 16_384  # tokens of a conversation that comes back
USERS, HELD, CONVERSATION, QUESTION, ANSWER = 12, 3, 20_000, 200, 60
DISK_TARGET = 0.2
BESIDE_TARGET = 1.03
SECOND_TARGET, TURNS_TARGET, DEMO_TARGET, OVERHEAD_TARGET = 0.05, 2.5, 0.2, 0.99
OVERHEAD_PLACES = 4_096
DEMO_TOKENS, DEMO_KV_TOKENS = 4_000, 4_600
QUALITY_TOKENS, QUALITY_BARS = 4_096, {"8 bits": 1e-3, "4 bits": 2e-2}
FACTS_TOKENS = 8_000  # nearly all that the demo model can read
RIVAL_TOKENS, RIVAL_QUESTION, RIVAL_ANSWER, RIVAL_RAM_MB = 2_000, 40, 16, 4_000
DECODE_TOKENS, DECODE_TARGETS = 8_192, {"8 bits": 2.5, "4 bits": 3.0}
FITS = (
    ("qwen3.6-27b:q4_k_m", "rtx4090", ("--kv", "8bit", "--context", "131072", "--concurrency", "1")),
    ("qwen3.6-27b:q4_k_m", "rtx4090", ("--context", "65536", "--concurrency", "1")),
    ("qwen3.6-35b-a3b:q4_k_m", "rtx4090", ("--kv", "8bit", "--context", "32768", "--concurrency", "1")),
    ("llama-3.3-70b:q4_k_m", "rtx4090, rtx4090", ("--kv", "8bit")),
    ("qwen3.6-27b:q4_k_m", "rtx4090", ("--kv", "4bit", "--context", "200000", "--concurrency", "1")),
    ("qwen3.6-35b-a3b:q4_k_m", "rtx4090", ("--kv", "4bit", "--context", "262144", "--concurrency", "1")),
    ("llama-3.3-70b:q4_k_m", "rtx4090, rtx4090", ("--kv", "4bit", "--context", "9000")),
)


def fits_rows(_full: bool) -> list[Row]:
    """Plan as the command does."""
    rows: list[Row] = []
    for model, devices, flags in FITS:
        command = [sys.executable, "-m", "edgepipe.cli", "plan", model, "--emulate", devices, *flags, "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout) if not done.returncode else {}
        name = f"edgepipe plan {model} --emulate '{devices}' {' '.join(flags)}"
        rows.append(Row(name, found.get("kv_tokens", 0), "KV tokens", target="fits", met=not done.returncode))
    return rows


class _Turn(NamedTuple):
    ttft_s: float
    cached: int  # prompt tokens
    ids: list[int]


def _prompt(user: int, count: int) -> list[int]:
    return [(31 * index * index + 7 * index + 977 * user) % 241 + 5 for index in range(count)]


async def _ask(gateway: FakeGateway, name: str, prompt: Sequence[int], max_tokens: int) -> _Turn:
    begun_s = time.perf_counter()
    gateway.send(submission(name, prompt, max_tokens))
    await gateway.has(name, 1)
    taken_s = time.perf_counter() - begun_s
    answer = await gateway.ended(name)
    assert answer.ended is not None
    found = _Turn(taken_s, answer.ended.cached_prompt_tokens, list(answer.ids))
    gateway.forget(name)
    return found


def _cards(time_factor: float) -> BackendOptions:
    return BackendOptions(device=DEVICE, settings={"time_factor": str(time_factor), "as_model": AS_MODEL})


def second_rows(full: bool) -> list[Row]:
    """A conversation is read, pushed out by another one, and continued."""
    rows: list[Row] = []
    for where, target in (("host memory", SECOND_TARGET), ("the disk", DISK_TARGET)):
        first, again = asyncio.run(_second(3 if full else 1, disk=where == "the disk"))
        name = f"TTFT of the second turn out of {where}, {LONG:,} tokens, {AS_MODEL} on 2 x {DEVICE}, emulated"
        rows.append(at_most(name, 1e3 * again, "ms", 1e3 * first, "reading it again", target))
    return rows


async def _second(rounds: int, *, disk: bool) -> tuple[float, float]:
    """Return the seconds of reading a conversation, and of its second turn.

    ``disk``: host memory holds two conversations, and three others push this one out of it.
    """
    config = emulated_model_config(num_layers=LAYERS, context_length=2 * LONG)
    options = _cards(1.0)
    first: list[float] = []
    again: list[float] = []
    async with engine_lab(
        config=config,
        max_blocks=LONG * 5 // 4 // BLOCK,
        max_host_blocks=(2 if disk else 4) * LONG // BLOCK,
        max_disk_blocks=8 * LONG // BLOCK if disk else 0,
        make_backend=lambda _: EmulatedBackend(options),
    ) as lab:
        gateway = await lab.gateway()
        gateway.patience_s = 120.0
        for number in range(rounds):
            chats = [_prompt(5 * number + each, LONG) for each in range(5 if disk else 2)]
            turns = [await _ask(gateway, f"r{number}-{each}", chat, 2) for each, chat in enumerate(chats)]
            first += [turn.ttft_s for turn in turns]
            turn = await _ask(gateway, f"r{number}-again", [*chats[0], *turns[0].ids, 7, 8, 9], 2)
            assert turn.cached >= LONG - BLOCK, "the second turn did not come from below the device"
            assert not disk or lab.engine.state().fetched_tokens >= LONG // 2 * (number + 1), "it was not on disk"
            again.append(turn.ttft_s)
    return statistics.median(first), statistics.median(again)


def turns_rows(full: bool) -> list[Row]:
    """Compare the tokens per second of users who take turns."""
    turns = USERS if full else 4
    without, with_tier = (asyncio.run(_turns(places, turns)) for places in (0, USERS * 2 * CONVERSATION // BLOCK))
    name = f"{USERS} users with {CONVERSATION:,} tokens each, a device for {HELD}, {AS_MODEL} on 2 x {DEVICE}, emulated"
    return [at_least(name, with_tier, "tok/s", without, "without host memory", TURNS_TARGET)]


async def _turns(host_blocks: int, turns: int) -> float:
    """Return the answers' tokens per second, once every conversation has been read."""
    config = emulated_model_config(num_layers=LAYERS, context_length=2 * CONVERSATION)
    options = _cards(1.0)
    async with engine_lab(
        config=config,
        max_blocks=HELD * (CONVERSATION + 1_000) // BLOCK,
        max_host_blocks=host_blocks,
        make_backend=lambda _: EmulatedBackend(options),
    ) as lab:
        gateway = await lab.gateway()
        gateway.patience_s = 600.0
        known = [_prompt(user, CONVERSATION) for user in range(USERS)]
        for user in range(0 if host_blocks else USERS - HELD, USERS):  # nothing is left of the others without it
            await _ask(gateway, f"begin-{user}", known[user], 2)
        begun_s = time.perf_counter()
        for user in range(turns):
            await _ask(gateway, f"turn-{user}", [*known[user], *_prompt(user + 99, QUESTION)], ANSWER)
        return turns * ANSWER / (time.perf_counter() - begun_s)


def beside_rows(full: bool) -> list[Row]:
    """Compare the steps of chats beside copies with the same steps without the copies.

    The devices' time decides: gaps as the chats see them vary by more than the bar on a machine that does other work.
    """
    rows: list[Row] = []
    for disk in (False, True):
        free, real = (gaps_beside_copies(free=free, disk=disk, visits=12 if full else 4) for free in (True, False))
        where = "disk and host memory" if disk else "host memory"
        name = f"{CHATS} chats beside visits of {VISIT:,} tokens from {where} and new prompts of {NEW}: time of a step"
        for part, growth in _growths(real):
            rows.append(at_most(f"{name}, {part}", growth, "x", 1.0, "without copies", BESIDE_TARGET))
        rows.append(Row("  copied on each card", real.copied_bytes / 1e9, "GB"))
        for share in (50, 99):
            gap_s, free_s = (float(np.percentile(each.seconds, share)) for each in (real, free))
            rows.append(Row(f"  gap between tokens, p{share}", 1e3 * gap_s, "ms", 1e3 * free_s, "", gap_s / free_s))
        first_s, free_s = (statistics.median(each.visits_s) for each in (real, free))
        rows.append(Row("  TTFT of a visit", 1e3 * first_s, "ms", 1e3 * free_s, "", first_s / free_s))
    return rows


def _growths(gaps: Gaps) -> list[tuple[str, float]]:
    return [
        ("mean", float(gaps.growths.mean())),
        ("p99", float(np.percentile(gaps.growths, 99))),
        ("worst", float(gaps.growths.max())),
    ]


def demo_rows(_full: bool) -> list[Row]:
    """The demo model, real processes and kernels."""
    with running_nodes(1, models_dir=stored_demo().path.parent, threads=1) as (node,):
        node.edgepipe("serve", "demo", "--kv-tokens", str(DEMO_KV_TOKENS), "--kv-ram", "2GB")
        chats = [[7 * token + 3 for token in _prompt(user, DEMO_TOKENS)] for user in range(3)]
        _demo_turn(node, chats[0][:300])  # warms the process up
        asked = [*chats[0], 11, 12, 13]
        first_s, ids = _demo_turn(node, asked)
        for chat in chats[1:]:
            _demo_turn(node, chat)
        again_s, same = _demo_turn(node, asked)
    assert ids == same, "host memory changed an answer"
    name = f"TTFT of the demo model after host memory, {DEMO_TOKENS:,} tokens, one thread of this CPU, ids equal"
    return [at_most(name, 1e3 * again_s, "ms", 1e3 * first_s, "reading it again", DEMO_TARGET)]


def _demo_turn(node: Node, prompt: list[int]) -> tuple[float, list[int]]:
    (answer,) = complete(node, [prompt], max_tokens=16)
    return answer.token_times_s[0] - answer.started_s, list(answer.token_ids)


def rival_rows(full: bool) -> list[Row]:
    """Let users take turns here and with llama.cpp's server: the same file, prompts, thread and room for KV.

    All run at once and answer one after another, so that they see the same machine.
    """
    folder = os.environ.get("EP_LLAMA_CPP")
    if not folder:
        print("llama.cpp is not measured: scripts/build_llama_cpp FOLDER server, then EP_LLAMA_CPP=FOLDER")
        return []
    length = RIVAL_TOKENS if full else RIVAL_TOKENS // 8
    with ExitStack() as stack:

        def theirs(slots: int, cache_mib: int) -> _Asked:
            room = _room_for(length)
            sizes = {"threads": 1, "context_tokens": room, "slots": slots, "cache_mib": cache_mib}
            server = stack.enter_context(llama_server(Path(folder), stored_demo().path / "model.gguf", **sizes))
            return _Asked(server.complete, cache_mib > 0)

        def ours(kv_ram: str) -> _Asked:
            (node,) = stack.enter_context(running_nodes(1, models_dir=stored_demo().path.parent, threads=1))
            node.edgepipe("serve", "demo", "--kv-tokens", str(_room_for(length)), "--kv-ram", kv_ram)
            return _Asked(
                lambda prompt, count: list(complete(node, [prompt], max_tokens=count)[0].token_ids), kv_ram != "off"
            )

        asked = [ours("off"), ours(f"{RIVAL_RAM_MB}MB"), theirs(1, 0)]
        asked += [theirs(slots, RIVAL_RAM_MB) for slots in (1, HELD)]
        settle()
        without, with_tier, bare, *cached = _turns_rates(length, asked)
    what = f"{USERS} users with {length:,} tokens each, room for {HELD}, the demo model, one thread of this CPU"
    rows = [at_least(what, with_tier, "tok/s", without, "without host memory", TURNS_TARGET)]
    for slots, rate in zip((1, HELD), cached, strict=True):
        name = f"  llama.cpp's server, slots: {slots}, --cache-ram"
        rows.append(Row(name, rate, "tok/s", bare, "1 slot, --cache-ram 0", rate / bare))
    best = max(cached)
    rows.append(Row("  host memory here against the better of these", with_tier, "tok/s", best, "", with_tier / best))
    return rows


class _Asked(NamedTuple):
    ask: Callable[[list[int], int], list[int]]  # returns so many tokens after a prompt
    keeps: bool  # conversations that the KV has no room for


def _turns_rates(length: int, asked: Sequence[_Asked]) -> list[float]:
    """Return the answers' tokens per second of one turn of each user, once the conversations have been read."""
    chats = [[7 * token + 3 for token in _prompt(user, length)] for user in range(USERS)]
    known: list[list[list[int]]] = []
    for ask, keeps in asked:
        read = range(0 if keeps else USERS - HELD, USERS)  # nothing would be left of the others
        known.append([[*chat, *(ask(chat, RIVAL_ANSWER) if user in read else [])] for user, chat in enumerate(chats)])
    taken_s = [0.0] * len(asked)
    for user in range(USERS):
        for index, (ask, _) in enumerate(asked):
            begun_s = time.perf_counter()
            ask([*known[index][user], *_prompt(user + 99, RIVAL_QUESTION)], RIVAL_ANSWER)
            taken_s[index] += time.perf_counter() - begun_s
    return [USERS * RIVAL_ANSWER / seconds for seconds in taken_s]


def _room_for(length: int) -> int:
    """Return the tokens of KV of so many users' conversations, with a turn more."""
    return HELD * (length + 2 * RIVAL_ANSWER + RIVAL_QUESTION + 64)


def overhead_rows(full: bool) -> list[Row]:
    """Compare tokens per second of processor time, turn by turn without and with host memory.

    Other programs take time from this process, but they add little to the processor time that it uses.
    """
    ratios: list[float] = []
    rates: dict[int, list[float]] = {0: [], OVERHEAD_PLACES: []}
    asyncio.run(_rate(OVERHEAD_PLACES))  # warms the process up
    for turn in range(24 if full else 12):
        order = (0, OVERHEAD_PLACES) if turn % 2 else (OVERHEAD_PLACES, 0)
        for places in order:
            rates[places].append(asyncio.run(_rate(places)))
        ratios.append(rates[OVERHEAD_PLACES][-1] / rates[0][-1])
    without, with_tier = (statistics.median(found) for found in rates.values())
    name = "hosts alone, 8 chats of 200 tokens, nothing is pushed out: per second of processor time"
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    return [
        at_least(name, with_tier, "tok/s", without, "without host memory", OVERHEAD_TARGET),
        Row("  mean of the ratios of neighbouring turns", statistics.mean(ratios), "x"),
        Row("  its standard error", spread, "x"),
    ]


async def _rate(host_blocks: int) -> float:
    """Return the tokens per second of this process's processor time: the engine, two stages and a gateway."""
    async with engine_lab(max_blocks=1_024, max_host_blocks=host_blocks) as lab:
        gateway = await lab.gateway()
        begun_s = time.process_time()
        await asyncio.gather(*[_ask(gateway, f"r{user}", _prompt(user, 40), 200) for user in range(8)])
        return 8 * 200 / (time.process_time() - begun_s)


def quality_rows(full: bool) -> list[Row]:
    """Compare predictions with those of wide KV; ``kv_quality`` says how."""
    model = stored_demo()
    tokens = model.tokenizer().encode(REFERENCE_TEXT)[: QUALITY_TOKENS if full else QUALITY_TOKENS // 4]
    rows: list[Row] = []
    for model_name, measured in (("", qualities(model, tokens)), ("hybrid, ", hybrid_qualities(len(tokens)))):
        for name, found in measured.items():
            what = f"{model_name}KV of {name}, {len(tokens):,} tokens: KL divergence"
            rows.append(below(what, found.kl, "nats", QUALITY_BARS[name]))
            rows.append(Row("  the same most likely token", 100 * found.same_token, "%"))
    return rows


def facts_rows(full: bool) -> list[Row]:
    """Count the facts that each form of KV finds, of those that wide KV finds."""
    counts = (QUALITY_TOKENS, FACTS_TOKENS) if full else (QUALITY_TOKENS // 4,)
    return [row for count in counts for row in _facts_of(stored_demo(), count)]


def _facts_of(model: StoredModel, count: int) -> list[Row]:
    wide = facts_found(model, "", count)
    rows = [Row(f"facts found with wide KV, {count:,} tokens, of {len(FACTS)}", len(wide), "facts")]
    for name, form in FORMS.items():
        found = facts_found(model, form, count)
        lost = [fact for fact in wide if fact not in found]
        what = f"lost: {', '.join(lost)}" if lost else "none lost"
        rows.append(Row(f"with KV of {name}, {what}", len(found), "facts", target="none lost", met=not lost))
    return rows


def decode_rows(full: bool) -> list[Row]:
    """Compare the time of a decode step that a long context costs."""
    times = decode_times(stored_demo(), DECODE_TOKENS, rounds=15 if full else 7)
    wide = times.pop("wide")
    rows: list[Row] = []
    for name, found in times.items():
        what = f"speed of attention to {DECODE_TOKENS:,} tokens, KV of {name}, one thread"
        values = 1 / found.attention_s, "steps/s", 1 / wide.attention_s
        rows.append(at_least(what, *values, "wide KV", DECODE_TARGETS[name]))
        whole = found.long_s, wide.long_s
        rows.append(Row("  whole steps", 1 / whole[0], "tok/s", 1 / whole[1], "wide KV", whole[1] / whole[0]))
    return rows


PARTS: dict[str, Part] = {
    "fits": fits_rows,
    "second": second_rows,
    "turns": turns_rows,
    "beside": beside_rows,
    "demo": demo_rows,
    "overhead": overhead_rows,
}


if __name__ == "__main__":
    named = {"quality": quality_rows, "facts": facts_rows, "rival": rival_rows, "decode": decode_rows}
    run_parts("context", PARTS, if_named=named)
