"""Packed weights on a CPU: exactness, quality and speed.

    scripts/bench packed [--full] [PART ...]

``--help`` lists the parts. They measure the demo model. ``--full``: every type and mix.
llama.cpp is measured where npm can install it without a compiler, K-quantised copies where ``xllamacpp`` is installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from bench_backend import NEW_TOKENS, PROMPT_TOKENS, Ours
from bench_foundation import stored_demo
from figures import Row, at_least
from gguf import GGMLQuantizationType, quants
from llama_cpp import llama_cpp
from packed_quality import kv_rows, quality_rows
from parts import Part, run_parts

from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.gguf_packing import gguf_form, pack_gguf
from edgepipe.weights.weights import open_weights
from tests.support.models.packed import random_blocks
from tests.support.models.quantised_folders import write_quantised_folder
from tests.support.models.quantised_weights import RECIPES

LLAMA_CONTEXT = 1024
ROUNDS = 4
SHORT_TYPES = ("Q4_K", "Q6_K")
ALL_TYPES = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q3_K", "IQ4_NL")


def exact_rows() -> list[Row]:
    """Compare every packed type of GGUF with gguf-py, bit by bit."""
    random = np.random.default_rng(0)
    types = [name for name in BLOCKS_BY_NAME if gguf_form(name) is not None]
    equal = 0
    for name in types:
        data = random_blocks(name, (64, 2048), random)
        info = TensorInfo(name="w", shape=(64, 2048), scheme=name, num_bytes=data.nbytes)
        expected = quants.dequantize(data.reshape(64, -1), GGMLQuantizationType[name])
        found = pack_gguf(StoredTensor(info=info, data=data.reshape(-1))).float32()
        equal += bool(np.array_equal(expected, found))
    requantised = sum(name.startswith(("IQ1", "IQ2", "IQ3")) for name in types)
    wanted = len(types) - requantised
    return [
        Row("GGUF types that unpack bit-exactly", equal, "types", wanted, "all but IQ1-3", None, "all", equal >= wanted)
    ]


def folder_row() -> Row:
    """Compare every weight of a tiny model in each form of safetensors with values from the form's definition."""
    equal = 0
    for name in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            expected = write_quantised_folder(Path(folder), name)
            source = open_weights(Path(folder))
            loaded = {weight: source.load(weight) for weight in expected}
            found = {
                key: each.float32() if isinstance(each, Packed) else as_float32(each) for key, each in loaded.items()
            }
            equal += all(np.array_equal(found[weight], values) for weight, values in expected.items())
    return Row(
        "forms of safetensors that unpack bit-exactly", equal, "forms", len(RECIPES), "tested", None, "all",
        equal == len(RECIPES),
    )  # fmt: skip


def speed_rows(model: Path) -> list[Row]:
    """Decode and prefill with packed and with widened weights and by llama.cpp on the same file, in turns."""
    rows: list[Row] = []
    for threads in (1, 2):
        weights = open_weights(model)
        packed = Ours(weights, device="cpu", threads=threads)
        wide = Ours(weights, device="cpu", threads=threads, settings={"weights": "wide"})
        where = f"{threads} thread{'s' * (threads > 1)}"
        with llama_cpp(model / "model.gguf", threads=threads, context_tokens=LLAMA_CONTEXT) as rival:
            decode = [packed.decode(1), wide.decode(1)]
            prefill = [packed.prefill(512), wide.prefill(512)]
            if rival is not None:
                decode.append(partial(rival.decode_s, NEW_TOKENS, prompt_tokens=PROMPT_TOKENS))
                prefill.append(partial(rival.prefill_s, 512))
            one, many = _rates(NEW_TOKENS, decode), _rates(16 * NEW_TOKENS, [packed.decode(16), wide.decode(16)])
            prompt = _rates(512, prefill)
        name = f"decode, 1 sequence, {where}"
        rows.append(at_least(name, one[0], "tok/s", one[1], "widened", 1.5))
        if rival is not None:
            rows.append(at_least(name, one[0], "tok/s", one[2], "llama.cpp", 0.85))
        rows.append(at_least(f"decode, 16 sequences, {where}", many[0], "tok/s", many[1], "widened", 0.8))
        name = f"prefill, 512 tokens, {where}"
        rows.append(at_least(name, prompt[0], "tok/s", prompt[1], "widened", 0.9))
        if rival is not None:
            rows.append(Row(name, prompt[0], "tok/s", prompt[2], "llama.cpp", prompt[0] / prompt[2]))
    return rows


def _rates(tokens: int, works: Sequence[Callable[[], float]]) -> list[float]:
    """Return tokens per second of each, from the least of its seconds, in turns after one round to warm up."""
    taken = [[work() for work in works] for _ in range(ROUNDS + 1)][1:]
    return [tokens / min(times) for times in zip(*taken, strict=True)]


def _of_demo(measure: Callable[[Path], list[Row]]) -> Part:
    """Return the part that measures the demo model."""
    return lambda _full: measure(stored_demo().path)


PARTS: dict[str, Part] = {
    "exact": lambda _full: [*exact_rows(), folder_row()],
    "speed": _of_demo(speed_rows),
    "kv": _of_demo(kv_rows),
    "quality": lambda full: quality_rows(stored_demo().path, ALL_TYPES if full else SHORT_TYPES),
}


if __name__ == "__main__":
    run_parts("packed", PARTS)
