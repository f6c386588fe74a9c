"""Packed weights on a CPU: exactness, quality and speed.

    scripts/bench packed [--full] [PART ...]

``--help`` lists the parts. They measure the demo model. ``--full``: every type and mix.
llama.cpp is measured where npm can install it without a compiler, K-quantised copies where ``xllamacpp`` is installed.
``instructions`` describes the CUDA products' compiled code, without a GPU, if it is named. ``crowded``, if it is
named, compares threads that are chosen beside other programs with one for each core.
``types``, and ``threads``, ``busy`` and ``wide`` if they are named, need a build for this processor:
``scripts/build_llama_cpp FOLDER``, then ``EP_LLAMA_CPP=FOLDER``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from bench_backend import NEW_TOKENS, PROMPT_TOKENS, Ours
from bench_foundation import stored_demo
from edgepipe_torch.cuda.kernels.nvrtc import find_nvrtc
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from figures import Row, at_least
from gguf import GGMLQuantizationType, quants
from kernel_code import H100, RTX_4090, busy_blocks, bytes_in_flight, codes_of, find_disassembler
from llama_cpp import llama_cpp
from packed_quality import kv_rows, products_rows, quality_rows
from packed_rivals import LLAMA_CONTEXT, busy_rows, crowded_rows, rates_of, thread_rows, type_rows, wide_rows
from parts import Part, run_parts

from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.gguf_packing import gguf_form, pack_gguf
from edgepipe.weights.weights import open_weights
from tests.support.backends.kernel_forms import FORMS
from tests.support.models.packed import random_blocks
from tests.support.models.quantised_folders import write_quantised_folder
from tests.support.models.quantised_weights import RECIPES

SHORT_TYPES = ("Q4_K", "Q6_K")
KERNEL_TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
MOST_INSTRUCTIONS, FEWEST_BLOCKS = 295, 2  # bounds: a tile of Q4_K and up to 8 rows; a multiprocessor with 64 rows
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
            one, many = rates_of(NEW_TOKENS, decode), rates_of(16 * NEW_TOKENS, [packed.decode(16), wide.decode(16)])
            prompt = rates_of(512, prefill)
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


def integer_rows(model: Path) -> list[Row]:
    """Compare products whose inputs are rounded to integers with others: quality, and speed on one thread in turns."""
    weights, rows = open_weights(model), products_rows(model)
    names = ("auto", "int16", "int8")
    stages = [Ours(weights, device="cpu", threads=1, settings={"products": name}) for name in names]
    for what, tokens, works in (
        ("decode, 1 row", NEW_TOKENS, [stage.decode(1) for stage in stages]),
        ("decode, 16 rows", 16 * NEW_TOKENS, [stage.decode(16) for stage in stages]),
        ("prefill, 512 tokens", 512, [stage.prefill(512) for stage in stages]),
    ):
        floats, *rates = rates_of(tokens, works)
        rows += [
            Row(f"products={name}, {what}", rate, "tok/s", floats, "inputs of float32", rate / floats)
            for name, rate in zip(names[1:], rates, strict=True)
        ]
    return rows


def instruction_rows(types: Sequence[str]) -> list[Row]:
    """Describe the compiled CUDA products of types, as an RTX 4090 runs them."""
    try:
        nvrtc = find_nvrtc(None)
    except KernelsUnavailable as exc:
        print(f"instructions are not counted: {exc} ({exc.remedy})")
        return []
    disassembler = find_disassembler()
    if disassembler is None:
        print("instructions are not counted: pip install nvidia-cuda-nvdisasm")
    rows: list[Row] = []
    for name in types:
        form = FORMS[name]
        for code in codes_of(nvrtc, form, RTX_4090, disassembler):
            what = f"{name}, {code.rows} rows{' of experts' if code.experts else ''}"
            if code.instructions is not None:
                met = code.instructions <= MOST_INSTRUCTIONS if (name, code.rows) == ("Q4_K", 8) else None
                target = "" if met is None else f"<= {MOST_INSTRUCTIONS}"
                rows.append(Row(f"{what}: a tile", code.instructions, "instructions", target=target, met=met))
            met = code.blocks >= FEWEST_BLOCKS if code.rows == 64 else None
            target = "" if met is None else f">= {FEWEST_BLOCKS}"
            spilt = f", {code.stack_bytes} bytes spill" if code.stack_bytes else ""
            rows.append(
                Row(f"{what}: {code.registers} registers{spilt}", code.blocks, "blocks an SM", target=target, met=met)
            )
        for card, least in ((RTX_4090, 1.5), (H100, 1.0)):
            blocks = codes_of(nvrtc, form, card, None)[0].blocks
            ratio = bytes_in_flight(form, card, busy_blocks(form, card, blocks))
            what = f"{name}, one row: bytes in flight on {card.name}"
            rows.append(Row(what, ratio, "x latency x rate", target=f">= {least}", met=ratio >= least))
    return rows


def _of_demo(measure: Callable[[Path], list[Row]]) -> Part:
    """Return the part that measures the demo model."""
    return lambda _full: measure(stored_demo().path)


def _demo_file() -> Path:
    return stored_demo().path / "model.gguf"


PARTS: dict[str, Part] = {
    "exact": lambda _full: [*exact_rows(), folder_row()],
    "speed": _of_demo(speed_rows),
    "types": lambda full: type_rows(_demo_file(), full=full),
    "kv": _of_demo(kv_rows),
    "integers": _of_demo(integer_rows),
    "quality": lambda full: quality_rows(stored_demo().path, ALL_TYPES if full else SHORT_TYPES),
}
NAMED: dict[str, Part] = {
    "instructions": lambda full: instruction_rows(list(FORMS) if full else KERNEL_TYPES),
    "threads": lambda _full: thread_rows(_demo_file()),
    "busy": lambda _full: busy_rows(_demo_file()),
    "crowded": lambda _full: crowded_rows(_demo_file()),
    "wide": lambda _full: wide_rows(),
}


if __name__ == "__main__":
    run_parts("packed", PARTS, if_named=NAMED)
