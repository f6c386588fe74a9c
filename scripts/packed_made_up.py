"""Memory and load time of a stage on a packed model of 4 GB with made-up weights, each in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from edgepipe_torch import TorchBackend
from figures import Row, below

from edgepipe.backend.types import BackendOptions
from edgepipe.spec.facts import LayerRange, Slice, make_slices
from edgepipe.spec.tensors import WeightSource
from edgepipe.text.template import ChatTemplate
from edgepipe.weights.card import ModelCard
from edgepipe.weights.gguf_split import GGUF_FILE
from edgepipe.weights.manifest import CARD_FILE
from edgepipe.weights.repacked import REPACKED_FOLDER
from edgepipe.weights.resident import resident_bytes
from edgepipe.weights.weights import open_gguf_weights, open_weights
from tests.support.models.packed import random_blocks

if TYPE_CHECKING:
    from gguf import GGUFWriter

MODEL_BYTES = 4_000_000_000
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14_336, 32, 8, 128, 32_000
BLOCK_TOKENS, KV_TOKENS = 64, 1024
MATRICES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
_KEPT_S = 300.0  # at most
ROOM_BYTES = 600_000_000  # besides weights and KV, at most


def memory_rows() -> list[Row]:
    """Resident memory, its peak while loading, and the seconds of the first and the second load."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made-up"
        path.mkdir()
        _write(path / GGUF_FILE)
        _describe(path)
        compiled = Path(folder) / "compiled"  # empty at the first load
        first, second = _loaded(path, compiled), _loaded(path, compiled)
        kept_bytes = sum(file.stat().st_size for file in (path / REPACKED_FOLDER).glob("*"))
    expected = first["weight_bytes"] + first["kv_bytes"] + ROOM_BYTES
    peak = expected + first["largest_bytes"]
    return [
        Row("packed file of made-up weights, Q4_K and Q6_K", first["file_bytes"] / 1e9, "GB"),
        Row("weights in memory, torch CPU", first["weight_bytes"] / 1e9, "GB", first["file_bytes"] / 1e9, "the file"),
        below("resident memory of the stage", first["resident_bytes"] / 1e9, "GB", round(expected / 1e9, 2)),
        below("peak while it loads", first["peak_bytes"] / 1e9, "GB", round(peak / 1e9, 2)),
        _load_row("load, first time: kernels are compiled, weights repacked", first, 20.0),
        _load_row("load, again: repacked weights are read", second, 4.0),
        Row("repacked weights on disk", kept_bytes / 1e9, "GB", first["file_bytes"] / 1e9, "the file"),
        Row("  written after the first load, beside nothing else", first["kept_s"], "s"),
        Row("processor time of the load, first time", first["cpu_s"], "s", first["read_cpu_s"], "reading alone"),
        Row("processor time of the load, again", second["cpu_s"], "s", second["read_cpu_s"], "reading alone"),
    ]


def _load_row(name: str, found: dict[str, float], limit_s: float) -> Row:
    """Compare a load with a limit, and with reading the same bytes by one thread."""
    load_s, read_s = found["load_s"], found["read_s"]
    return Row(name, load_s, "s", read_s, "reading alone", load_s / read_s, f"<= {limit_s:g} s", load_s <= limit_s)


def _write(path: Path) -> None:
    """Write a GGUF file of the shape of an 8B Llama, with as many layers as MODEL_BYTES hold."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "llama", use_temp_file=False)
    random = np.random.default_rng(0)
    blocks = {
        (name, scheme): random_blocks(scheme, shape, random)
        for name, shape in MATRICES.items()
        for scheme in ("Q4_K", "Q6_K")
    }
    layer_bytes = sum(blocks[name, "Q4_K"].nbytes for name in MATRICES)
    layers = MODEL_BYTES // layer_bytes + 1
    add_llama_shape(writer, layers)
    norm = np.ones(HIDDEN, np.float32)

    def add(name: str, scheme: str, data: np.ndarray, rows: int) -> None:
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=GGMLQuantizationType[scheme])

    add("token_embd.weight", "Q4_K", random_blocks("Q4_K", (VOCAB, HIDDEN), random), VOCAB)
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", norm)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", norm)
        for name, shape in MATRICES.items():
            scheme = "Q6_K" if name in ("attn_v", "ffn_down") and layer % 2 else "Q4_K"
            add(f"blk.{layer}.{name}.weight", scheme, blocks[name, scheme], shape[0])
    writer.add_tensor("output_norm.weight", norm)
    add("output.weight", "Q6_K", random_blocks("Q6_K", (VOCAB, HIDDEN), random), VOCAB)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(folder: Path) -> None:
    """Make a folder with a GGUF file a model of the store, as far as loading needs."""
    config = open_gguf_weights(folder / GGUF_FILE).config
    (folder / CARD_FILE).write_bytes(ModelCard(config=config, template=ChatTemplate(sources={})).to_json())


def add_llama_shape(writer: GGUFWriter, layers: int) -> None:
    """Add the metadata of an 8B Llama's shape with so many layers."""
    for key, value in {
        "context_length": 4096, "embedding_length": HIDDEN, "block_count": layers, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)


def _loaded(path: Path, cache: Path) -> dict[str, float]:
    """Load the file in a new process; return what that process measured. ``cache``: for compiled kernels."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, __file__, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(found.stdout.splitlines()[-1])


def _measure(path: Path) -> dict[str, float]:
    process = psutil.Process()
    backend = TorchBackend(BackendOptions(device="cpu", threads=2))
    source = open_weights(path)
    layers = source.config.num_layers
    slices = make_slices([LayerRange(0, layers)], layers)
    _read_all(source, slices)  # into the system's cache
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    _read_all(source, slices)
    read_s, read_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    before = process.memory_info().rss
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    backend.load(slices, source, lambda _progress: None)
    load_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    backend.allocate_kv(num_blocks=KV_TOKENS // BLOCK_TOKENS, block_size=BLOCK_TOKENS)
    found = {
        "load_s": load_s,
        "cpu_s": cpu_s,
        "read_s": read_s,
        "read_cpu_s": read_cpu_s,
        "file_bytes": (path / GGUF_FILE).stat().st_size,
        "weight_bytes": sum(
            resident_bytes(info.form, info.shape, kind="torch-cpu", dtype="float32")
            for info in source.weights(slices[0])
        ),
        "largest_bytes": max(info.num_bytes for info in source.tensors(slices[0])),
        "kv_bytes": backend.kv_block_bytes(source.config, slices, BLOCK_TOKENS) * KV_TOKENS / BLOCK_TOKENS,
        "resident_bytes": process.memory_info().rss,
        "before_bytes": before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    begun_s = time.perf_counter()
    backend.wait_until_kept(_KEPT_S)
    return found | {"kept_s": time.perf_counter() - begun_s}


def _read_all(source: WeightSource, slices: Sequence[Slice]) -> None:
    for part in slices:
        for info in source.tensors(part):
            source.read(info.name)


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]))))
