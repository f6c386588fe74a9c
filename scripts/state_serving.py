"""Hybrids served: what known prompts save, and how long answers pause after a killed stage."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from edgepipe_emulated import EmulatedBackend, emulated_model_config
from figures import Row, at_most
from local_nodes import Node, complete, running_nodes
from transformers import PretrainedConfig

from edgepipe.backend.types import BackendOptions
from edgepipe.spec.facts import ModelConfig
from edgepipe.store.store import ModelStore
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from tests.support.engine.lab import engine_lab, oracle_tokens, submission
from tests.support.faults.chaos.cluster import ChaosCluster, chaos_cluster
from tests.support.models.files import gguf_text
from tests.support.models.recurrent_checkpoints import DELTA, made, save_checkpoint
from tests.support.numerics.recurrent_forms import MIXERS
from tests.support.processes.nodes import kv_is_free, until_answers
from tests.support.processes.streams import Stream

PREFIX = 4000  # tokens, whole blocks
REUSE_TARGET, STALL_TARGET = 0.3, 1.75
REUSES, FULL_REUSES = 2, 5
KILLS, FULL_KILLS = 2, 12
AS_MODEL, DEVICE = "qwen3.6-35b-a3b:q4_k_m", "rtx4090"
STALL_AS, STALL_PROMPTS = "llama-3.1-8b:q4_k_m", (60, 2000)
ANSWER, STRUCK_AFTER = 120, 10  # tokens
_CONTEXT = 8192
_KV_TOKENS = 16_384  # of all streams
_PLAN = "b:0-1,c:2-3"
_PLAN_EMULATED = "b:0-2,c:3-5"
_TINY: Mapping[str, Callable[[], PretrainedConfig]] = {
    "hybrid": MIXERS["gated DeltaNet"],
    "dense": made(
        "Qwen3_5TextConfig",
        DELTA,
        intermediate_size=48,
        max_position_embeddings=_CONTEXT,
        layer_types=["full_attention"] * 4,
    ),
}


def reuse_rows(full: bool) -> list[Row]:
    """Compare the TTFT of a prompt whose beginning is known with that of a new one."""
    rounds = FULL_REUSES if full else REUSES
    with tempfile.TemporaryDirectory() as name:
        folder = stored(Path(name), "hybrid")
        with running_nodes(1, models_dir=folder, threads=1) as (node,):
            node.edgepipe("serve", "hybrid", "--context", str(_CONTEXT))
            tiny = [_ttfts(lambda prompt: _real_ttft_s(node, prompt), number) for number in range(rounds + 1)]
    emulated = asyncio.run(_emulated_ttfts(rounds))
    return [
        *_reuse_rows("a tiny checkpoint on torch, real processes", tiny[1:]),  # the first warms the process up
        *_reuse_rows(f"{AS_MODEL} emulated on {DEVICE}", emulated),
    ]


class _Ttfts(NamedTuple):
    first_s: float
    again_s: float  # of a prompt with another last token
    parted_s: float  # of one whose last tenth differs


def _prompts(number: int) -> tuple[list[int], list[int], list[int]]:
    """Return a prompt, one with another last token, and one whose last tenth differs."""
    prefix = [(31 * index * index + 7 * index + 977 * number) % 53 + 5 for index in range(PREFIX)]
    parted = [*prefix[: PREFIX * 9 // 10], *prefix[: PREFIX // 10]]
    return [*prefix, 5], [*prefix, 6], [*parted, 7]


def _ttfts(ttft_s: Callable[[list[int]], float], number: int) -> _Ttfts:
    return _Ttfts(*[ttft_s(prompt) for prompt in _prompts(number)])


def _real_ttft_s(node: Node, prompt: list[int]) -> float:
    (answer,) = complete(node, [prompt], max_tokens=2)
    return answer.token_times_s[0] - answer.started_s


async def _emulated_ttfts(rounds: int) -> list[_Ttfts]:
    """A real engine and its stages in this process; the device takes the time of the model."""
    options = BackendOptions(device=DEVICE, settings={"time_factor": "1", "as_model": AS_MODEL})
    config = emulated_model_config(num_layers=8, context_length=_CONTEXT, attention_every=4)
    found: list[_Ttfts] = []
    async with engine_lab(config=config, max_blocks=4096, make_backend=lambda _: EmulatedBackend(options)) as lab:
        gateway = await lab.gateway()
        for number in range(rounds):
            taken: list[float] = []
            for index, prompt in enumerate(_prompts(number)):
                name, begun_s = f"r{number}-{index}", time.perf_counter()
                gateway.send(submission(name, prompt, 2))
                await gateway.has(name, 1)
                taken.append(time.perf_counter() - begun_s)
                await gateway.ended(name)
            found.append(_Ttfts(*taken))
    return found


def _reuse_rows(what: str, found: Sequence[_Ttfts]) -> list[Row]:
    first_s, again_s, parted_s = (statistics.median(times) for times in zip(*found, strict=True))
    name = f"second TTFT, {PREFIX} known tokens, {what}"
    return [
        at_most(name, 1e3 * again_s, "ms", 1e3 * first_s, "the first TTFT", REUSE_TARGET),
        Row("  where the last tenth differs", 1e3 * parted_s, "ms", 1e3 * first_s, "the first", parted_s / first_s),
    ]


def stored(place: Path, name: str) -> Path:
    """Put a tiny checkpoint with a tokenizer into a store in ``place``; return the store's folder."""
    folder = place / name
    folder.mkdir()
    save_checkpoint(_TINY[name](), folder, [5, 6], slow=True)
    Tokenizer.from_gguf(gguf_text()).save(folder / "tokenizer.json")
    ModelStore(place / "models").pull(str(folder))
    return place / "models"


def stall_rows(full: bool) -> list[Row]:
    """Compare the pauses of hybrids with those of models with attention alone."""
    return asyncio.run(_stall_rows(FULL_KILLS if full else KILLS))


async def _stall_rows(kills: int) -> list[Row]:
    rows: list[Row] = []
    for what, pair in (("tiny checkpoints on torch", _real_pair), (f"emulated {STALL_AS}", _emulated_pair)):
        async with pair() as served:
            for length in STALL_PROMPTS:
                rows += await _compared(what, served, length, kills)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model that nodes serve."""

    cluster: ChaosCluster
    model: str
    config: ModelConfig | None = None  # of an emulated one, whose right tokens are known


@asynccontextmanager
async def _real_pair() -> AsyncIterator[list[Served]]:
    """A hybrid and a dense model of its size."""
    flags: dict[str, Any] = {"backend": "torch", "backend_options": None, "threads": 1, "link": None}
    async with AsyncExitStack() as stack:
        served: list[Served] = []
        for model in ("hybrid", "dense"):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgepipe-")))
            cluster = chaos_cluster(
                place,
                names=("b", "c"),
                model=model,
                plan=_PLAN,
                models_dir=str(stored(place, model)),
                options=ServeSpec(model=model, kv_tokens=_KV_TOKENS),
                **flags,
            )
            served.append(Served(cluster=await stack.enter_async_context(cluster), model=model))
        yield served


@asynccontextmanager
async def _emulated_pair() -> AsyncIterator[list[Served]]:
    """The same, of a large model's time."""
    async with AsyncExitStack() as stack:
        served: list[Served] = []
        for attention_every in (3, 1):
            config = emulated_model_config(num_layers=6, context_length=4096, attention_every=attention_every)
            kv_bytes = config.kv_bytes_per_token(form="bfloat16")  # else the KV of the large model would fill its share
            options = f"time_factor=1,as_model={STALL_AS},as_kv_bytes_per_token={kv_bytes}"
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgepipe-")))
            cluster = chaos_cluster(
                place,
                names=("b", "c"),
                plan=_PLAN_EMULATED,
                config=config,
                options=ServeSpec(model="tiny", kv_tokens=_KV_TOKENS),
                backend_options=options,
            )
            served.append(Served(cluster=await stack.enter_async_context(cluster), model="tiny", config=config))
        yield served


async def _compared(what: str, served: Sequence[Served], length: int, kills: int) -> list[Row]:
    """Kill stages of both in turns, the last and the first alternately."""
    stalls: list[list[float]] = [[] for _ in served]
    for number in range(kills):
        for one, found in zip(served, stalls, strict=True):
            for node in (node for each in served for node in each.cluster.running.values()):
                await node.until(_has_spare)  # the start of a spare process would take the cores from this stall
            found += await _kill(one, length, number)
    hybrid_s, dense_s = (statistics.median(times) for times in stalls)
    name = f"stall after a killed stage, {what}, prompts of {length} tokens"
    worst = [max(times) for times in stalls]
    return [
        at_most(name, hybrid_s, "s", dense_s, "of a dense model", STALL_TARGET),
        Row(f"  worst of {len(stalls[0])}", worst[0], "s", worst[1], "of a dense model", worst[0] / worst[1]),
    ]


async def _kill(served: Served, length: int, number: int) -> list[float]:
    """Kill a stage in mid-answer; return each stream's longest pause after it."""
    cluster = served.cluster
    before = (await cluster.until_ready()).engines[0].epoch.counter
    await until_answers(cluster.http_port)
    prompts = [
        [(31 * index * index + 7 * index + 101 * number + own) % 53 + 5 for index in range(length)] for own in (0, 1)
    ]
    streams = [TimedStream(prompt, ANSWER, model=served.model) for prompt in prompts]
    victims = await cluster.children("stage")
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(cluster.http_port))
        await asyncio.gather(*(stream.has(STRUCK_AFTER) for stream in streams))
        struck_s = time.perf_counter()
        psutil.Process(victims[(number + 1) % 2][1]).kill()
    for prompt, stream in zip(prompts, streams, strict=True):
        stream.check(oracle_tokens(prompt, ANSWER, config=served.config) if served.config else None)
    if (await cluster.first.until(kv_is_free)).engines[0].epoch.counter == before:
        raise RuntimeError("the answers were complete before the kill")
    return [stream.stall_s(struck_s) for stream in streams]


def _has_spare(status: ClusterStatus) -> bool:
    """Whether the node has a spare stage process beside the one that serves."""
    return sum(child.kind == "stage" and child.state == "running" for child in status.children) > 1


@dataclass(slots=True)
class TimedStream(Stream):
    """A stream that knows when each token came."""

    times_s: list[float] = field(default_factory=list[float])

    async def _take(self, chunk: dict[str, Any]) -> None:
        await Stream._take(self, chunk)
        self.times_s += [time.perf_counter()] * (len(self.ids) - len(self.times_s))

    def stall_s(self, since_s: float) -> float:
        """Return the longest pause that ended after this moment."""
        pairs = itertools.pairwise(self.times_s)
        return max(later - before for before, later in pairs if later > since_s)

    def check(self, right: list[int] | None) -> None:
        """Raise RuntimeError if a token is missing, or wrong where the right ones are known."""
        if self.error or len(self.ids) != self.max_tokens or (right is not None and self.ids != right):
            raise RuntimeError(f"a stream is wrong: {self.error}, {len(self.ids)} tokens")
