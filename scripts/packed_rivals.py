"""Packed weights against a native build of llama.cpp on the same files, in turns in one run."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
from bench_backend import NEW_TOKENS, PROMPT_TOKENS, Ours
from figures import Row, at_least
from llama_cpp import native_llama_cpp

from edgepipe.testing.tiny_model import tiny_config
from edgepipe.weights.weights import open_weights
from tests.support.models.files import random_tensors, write_gguf

LLAMA_CONTEXT = 1024
ROUNDS = 3
MIXES = {"Q4_K_M": 15, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3}  # ``llama_ftype``
QUIET, BUSY = 1.15, 1.0  # bars
_NEIGHBOUR_FLOATS = 8 << 20  # an array that no cache holds

Pick = Callable[[Sequence[float]], float]


def type_rows(model: Path, *, full: bool) -> list[Row]:
    """Each type that people have, on one thread of a quiet machine; ``full``: products of integers, too."""
    ways = {"": "auto", **({f", products={name}": name for name in ("int16", "int8")} if full else {})}
    return [row for name, ftype in _built(MIXES) for row in _rows(model, name, ftype, ways=ways, threads=1)]


def thread_rows(model: Path) -> list[Row]:
    """The same with as many threads as there are cores."""
    threads = os.cpu_count() or 1
    label = f", {threads} threads"
    return [row for name, ftype in _built(MIXES) for row in _rows(model, name + label, ftype, threads=threads)]


def busy_rows(model: Path) -> list[Row]:
    """The same on one thread, with a neighbour on every core that reads memory all the time: medians."""
    found: list[Row] = []
    for name, ftype in _built(MIXES):
        with _neighbours(os.cpu_count() or 1):
            label = f"{name}, every core busy"
            found += _rows(model, label, ftype, threads=1, target=BUSY, pick=statistics.median)
    return found


def crowded_rows(model: Path) -> list[Row]:
    """Threads chosen beside other programs against one for each core, each in a process of its own, in turns."""
    found: list[Row] = []
    cores = os.cpu_count() or 1
    for neighbours, target in ((0, 0.95), (cores, 1.0)):
        with _own_process() as chosen, _own_process() as fixed, _neighbours(neighbours):
            works = [partial(_decode_there, stage, model, threads) for stage, threads in ((chosen, 0), (fixed, cores))]
            rates = rates_of(NEW_TOKENS, works, pick=statistics.median)
        label = f"decode beside {neighbours} programs, threads chosen"
        found.append(at_least(label, rates[0], "tok/s", rates[1], f"{cores} threads", target))
    return found


@contextmanager
def _own_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process


def _decode_there(process: ProcessPoolExecutor, model: Path, threads: int) -> float:
    return process.submit(_decode_s, model, threads).result()


@cache
def _stage(model: Path, threads: int) -> Callable[[], float]:
    return Ours(open_weights(model), device="cpu", threads=threads).decode(1)


def _decode_s(model: Path, threads: int) -> float:
    return _stage(model, threads)()


def wide_rows() -> list[Row]:
    """Rows of 4,096 and 8,192: a layer as wide as those of large models, of random weights."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for name, ftype in _built(MIXES):
            if not path.exists():
                _write_wide(path)
            found += _rows(path, f"{name}, rows of 4,096", ftype, threads=1)
    return found


def _built(mixes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    if os.environ.get("EP_LLAMA_CPP"):
        yield from mixes.items()
    else:
        print("llama.cpp is not measured: scripts/build_llama_cpp FOLDER, then EP_LLAMA_CPP=FOLDER")


def _rows(
    model: Path,
    name: str,
    ftype: int,
    *,
    threads: int,
    ways: Mapping[str, str] | None = None,
    target: float = QUIET,
    pick: Pick = min,
) -> list[Row]:
    """Decode of 1 and 16 rows, and a prompt, of the model in another mix; ``ways``: products by label."""
    rival_of = partial(native_llama_cpp, Path(os.environ["EP_LLAMA_CPP"]), context_tokens=LLAMA_CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        with rival_of(model, threads=threads, rows=1) as rival:
            rival.quantise(path, ftype)
        weights = open_weights(path)
        ours = {
            f"{name}{label}": Ours(weights, device="cpu", threads=threads, settings={"products": products})
            for label, products in (ways or {"": "auto"}).items()
        }
        found: list[Row] = []
        for count in (1, 16):
            with rival_of(path, threads=threads, rows=count) as rival:
                theirs = partial(rival.decode_s, NEW_TOKENS, prompt_tokens=PROMPT_TOKENS)
                decodes = (
                    f"decode, {count} rows",
                    count * NEW_TOKENS,
                    [stage.decode(count) for stage in ours.values()],
                )
                works = [(*decodes, theirs)]
                if count == 1:
                    prompts = [stage.prefill(512) for stage in ours.values()]
                    works.append(("prefill, 512 tokens", 512, prompts, partial(rival.prefill_s, 512)))
                for what, tokens, own, their in works:
                    *rates, rate = rates_of(tokens, [*own, their], pick=pick)
                    found += [
                        at_least(f"{label}, {what}", each, "tok/s", rate, "llama.cpp", target)
                        for label, each in zip(ours, rates, strict=True)
                    ]
        return found


def rates_of(tokens: int, works: Sequence[Callable[[], float]], *, pick: Pick = min) -> list[float]:
    """Return tokens per second of each, from the least (or ``pick``) of its seconds, in turns after one to warm up."""
    taken = [[work() for work in works] for _ in range(ROUNDS + 1)][1:]
    return [tokens / pick(times) for times in zip(*taken, strict=True)]


def _write_wide(path: Path) -> None:
    config = tiny_config(
        num_layers=1,
        hidden_size=4096,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=4096,
        context_length=LLAMA_CONTEXT,
    )
    tokens = [f"t{index}" for index in range(config.vocab_size)]
    tensors = {name: tensor * np.float32(0.02) for name, tensor in random_tensors(config).items()}
    write_gguf(path, tensors, config, scheme="F16", tokens=tokens)


@contextmanager
def _neighbours(count: int) -> Generator[None]:
    """Keep ``count`` processes reading memory."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_read_memory, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _read_memory() -> None:
    values = np.ones(_NEIGHBOUR_FLOATS, np.float32)
    while True:
        values.sum()
