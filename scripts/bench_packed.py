"""Packed weights on a CPU: exactness, quality, memory, load time and speed.

    scripts/bench packed [--model FOLDER] [--only exact,speed,shape,quality,kv,memory] [--full]

``--full`` measures the quality of every type. llama.cpp is measured where npm can install it without a compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_backend import NEW_TOKENS, Ours
from bench_foundation import stored_demo
from figures import ROOT, Row, at_least, print_rows
from gguf import GGMLQuantizationType, quants
from packed_made_up import memory_rows
from packed_quality import kv_rows, quality_rows
from packed_shape import shape_rows

from edgepipe.model.gguf_packing import gguf_form, pack_gguf
from edgepipe.model.gguf_types import BLOCKS_BY_NAME
from edgepipe.model.tensors import RawTensor, TensorInfo
from edgepipe.model.weights import open_weights
from tests.support.packed_models import random_blocks

LLAMA_PACKAGES = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")
LLAMA_PROMPT, LLAMA_TOKENS, LLAMA_ROUNDS = 512, 48, 4
ROUNDS = 5
SHORT_TYPES = ("Q4_K", "Q6_K")
ALL_TYPES = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q3_K", "IQ4_NL")


def main() -> None:
    """Measure what is asked for, print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--only", default="exact,speed,shape,quality,kv,memory")
    parser.add_argument("--full", action="store_true")
    asked = parser.parse_args()
    model = asked.model or stored_demo().path
    parts: dict[str, Callable[[], list[Row]]] = {
        "exact": exact_rows,
        "speed": lambda: speed_rows(model),
        "shape": shape_rows,
        "quality": lambda: quality_rows(model, ALL_TYPES if asked.full else SHORT_TYPES),
        "kv": lambda: kv_rows(model),
        "memory": memory_rows,
    }
    print_rows("packed", [row for name in asked.only.split(",") for row in parts[name]()])


def exact_rows() -> list[Row]:
    """Compare every packed type of GGUF with gguf-py, bit by bit."""
    random = np.random.default_rng(0)
    types = [name for name in BLOCKS_BY_NAME if gguf_form(name) is not None]
    equal = 0
    for name in types:
        data = random_blocks(name, (64, 2048), random)
        info = TensorInfo(name="w", shape=(64, 2048), scheme=name, num_bytes=data.nbytes)
        expected = quants.dequantize(data.reshape(64, -1), GGMLQuantizationType[name])
        found = pack_gguf(RawTensor(info=info, data=data.reshape(-1))).float32()
        equal += bool(np.array_equal(expected, found))
    requantised = sum(name.startswith(("IQ1", "IQ2", "IQ3")) for name in types)
    wanted = len(types) - requantised
    return [
        Row("GGUF types that unpack bit-exactly", equal, "types", wanted, "all but IQ1-3", None, "all", equal >= wanted)
    ]


def speed_rows(model: Path) -> list[Row]:
    """Decode and prefill with packed and with widened weights, in turns; and llama.cpp on the same file."""
    rows: list[Row] = []
    for threads in (1, 2):
        weights = open_weights(model)
        packed = Ours(weights, device="cpu", threads=threads)
        wide = Ours(weights, device="cpu", threads=threads, settings={"weights": "wide"})
        where = f"{threads} thread{'s' if threads > 1 else ''}"
        alone, alone_wide = _in_turns(packed.decode(1), wide.decode(1))
        rows.append(
            at_least(
                f"decode, 1 sequence, {where}", NEW_TOKENS / alone, "tok/s", NEW_TOKENS / alone_wide, "widened", 1.5
            )
        )
        many, many_wide = _in_turns(packed.decode(16), wide.decode(16))
        rows.append(_rate(f"decode, 16 sequences, {where}", 16 * NEW_TOKENS, many, many_wide, 0.8))
        prompt, prompt_wide = _in_turns(packed.prefill(512), wide.prefill(512))
        rows.append(_rate(f"prefill, 512 tokens, {where}", 512, prompt, prompt_wide, 0.9))
        rival = _llama_cpp(model, threads)
        again, _ = _in_turns(packed.decode(1), packed.decode(1))  # close to the rival's in time
        if rival is not None:
            decode, prefill = NEW_TOKENS / min(alone, again), 512 / prompt
            name = f"decode, 1 sequence, {where}"
            rows.append(at_least(name, decode, "tok/s", rival["decode_tok_s"], "llama.cpp", 0.85))
            rows.append(Row(f"prefill, 512 tokens, {where}", prefill, "tok/s", rival["prefill_tok_s"], "llama.cpp"))
    return rows


def _rate(name: str, tokens: int, own_s: float, wide_s: float, target: float) -> Row:
    return at_least(name, tokens / own_s, "tok/s", tokens / wide_s, "widened", target)


def _in_turns(first: Callable[[], float], second: Callable[[], float]) -> tuple[float, float]:
    """Return the least seconds of each, in turns after one round to warm up."""
    taken = [(first(), second()) for _ in range(ROUNDS + 1)][1:]
    own, other = zip(*taken, strict=True)
    return min(own), min(other)


def _llama_cpp(model: Path, threads: int) -> dict[str, float] | None:
    """Return llama.cpp's rates on the model's file, or None where it cannot be had."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgepipe-bench"
    if shutil.which("npm") is None or shutil.which("node") is None:
        print("llama.cpp is not measured: npm and node are needed")
        return None
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}", encoding="utf-8")
        command = ["npm", "install", "--ignore-scripts", "--omit=optional", "--prefix", str(folder), *LLAMA_PACKAGES]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            print("llama.cpp is not measured: npm could not install it")
            return None
    numbers = [str(number) for number in (threads, LLAMA_PROMPT, LLAMA_TOKENS, LLAMA_ROUNDS)]
    found = subprocess.run(
        ["node", str(ROOT / "scripts" / "llama_cpp.mjs"), str(model / "model.gguf"), *numbers],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"NODE_LLAMA_CPP": str(folder)},
    )
    return json.loads(found.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
