"""Hybrids served: what known prompts save."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from edgepipe_emulated import EmulatedBackend, emulated_model_config
from figures import Row, at_most
from local_nodes import Node, complete, running_nodes

from edgepipe.backend.types import BackendOptions
from edgepipe.store.store import ModelStore
from edgepipe.text.tokenizer import Tokenizer
from tests.support.engine.lab import engine_lab, submission
from tests.support.models.files import gguf_text
from tests.support.models.recurrent_checkpoints import save_checkpoint
from tests.support.numerics.recurrent_forms import MIXERS

PREFIX = 4000  # tokens, whole blocks
REUSE_TARGET = 0.3
REUSES, FULL_REUSES = 2, 5
AS_MODEL, DEVICE = "qwen3.6-35b-a3b:q4_k_m", "rtx4090"
_CONTEXT = 8192


def reuse_rows(full: bool) -> list[Row]:
    """Compare the TTFT of a prompt whose beginning is known with that of a new one."""
    rounds = FULL_REUSES if full else REUSES
    with tempfile.TemporaryDirectory() as name:
        folder = _stored(Path(name), "hybrid")
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
    again_s: float  # prompt with another last token
    parted_s: float  # prompt whose last tenth differs


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


def _stored(place: Path, name: str) -> Path:
    """Put a tiny checkpoint with a tokenizer into a store in ``place``; return the store's folder."""
    folder = place / name
    folder.mkdir()
    save_checkpoint(MIXERS["gated DeltaNet"](), folder, [5, 6], slow=True)
    Tokenizer.from_gguf(gguf_text()).save(folder / "tokenizer.json")
    ModelStore(place / "models").pull(str(folder))
    return place / "models"
