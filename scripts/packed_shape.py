"""One decoder layer of an 8B Llama with K types on a CPU: packed, widened to fp16, by int4pack and by llama.cpp.

All compute a layer with the same matrices. llama.cpp runs whole models with one and with three layers; half of the
difference is its layer. int4pack is torch's product alone, with random codes: it has neither norms nor attention.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgepipe_torch import TorchBackend
from figures import Row
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from llama_cpp import LlamaCpp, llama_cpp
from packed_made_up import add_llama_shape

from edgepipe.backend.types import BackendOptions, BlockRun, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.model.facts import LayerRange, ModelConfig, Slice
from edgepipe.model.layout import layer_tensors
from edgepipe.shapes.loader import named_shape
from tests.support.packed_models import PackedTinyModel, random_raw

ROUNDS = 6
ROWS = (1, 5, 16)
_MIXES: dict[str, Mapping[str, str]] = {
    "Q4_K": {"": "Q4_K"},
    "Q4_K, v and down Q6_K": {"v_proj.weight": "Q6_K", "down_proj.weight": "Q6_K", "": "Q4_K"},
}
_FEW, _MANY = 1, 3  # llama.cpp's layers
_VOCABULARY = 512
_INT4_GROUP = 32
_READ_BYTES = 1 << 30
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def shape_rows(full: bool) -> list[Row]:
    """Milliseconds of one layer for each number of rows: the least of several, in turns. ``full``: of every mix."""
    shape = named_shape("llama-3.1-8b")
    config = replace(shape, layers=shape.layers[:_MANY], vocab_size=_VOCABULARY)
    rows: list[Row] = []
    for mix, schemes in list(_MIXES.items())[: None if full else 1]:
        source = PackedTinyModel(config, schemes)
        with tempfile.TemporaryDirectory() as folder:
            files = [_gguf(source, count, Path(folder) / f"{count}.gguf") for count in (_FEW, _MANY)]
            for threads in (1, 2):
                rows += _rows_of(source, mix, files, threads)
    return rows


def _rows_of(source: PackedTinyModel, mix: str, files: list[Path], threads: int) -> list[Row]:
    config = source.config
    part = Slice(index=1, layers=LayerRange(1, 2), embedding=False, head=False)
    packed_s = sum(info.num_bytes for info in source.tensors(part)) / read_rate(threads)
    backends = [_backend(source, part, threads, weights) for weights in ("auto", "wide")]
    matrices = _int4_matrices(config)
    rows: list[Row] = []
    with ExitStack() as running:
        rivals = [running.enter_context(llama_cpp(file, threads=threads, context_tokens=64)) for file in files]
        for count in ROWS:
            works = [_step(backend, config.hidden_size, count) for backend in backends]
            works.append(_int4_products(matrices, count))
            works += [_prefill(rival, count) for rival in rivals if rival is not None]
            own_s, wide_s, int4_s, *rival_s = np.min(
                [[work() for work in works] for _ in range(ROUNDS + 1)][1:], axis=0
            )
            name = f"8B layer, {mix}, {count} row{'s' * (count > 1)}, {threads} thread{'s' * (threads > 1)}"
            others = {"widened (fp16)": wide_s, "int4pack, bf16, products alone": int4_s}
            if rival_s:
                others["llama.cpp"] = (rival_s[1] - rival_s[0]) / (_MANY - _FEW)
            if count == 1:
                others["packed bytes / read rate"] = packed_s
            rows += [Row(name, 1e3 * own_s, "ms", 1e3 * other, of, own_s / other) for of, other in others.items()]
    for backend in backends:
        backend.close()
    return rows


def _backend(source: PackedTinyModel, part: Slice, threads: int, weights: str) -> TorchBackend:
    backend = TorchBackend(BackendOptions(device="cpu", threads=threads, settings={"weights": weights}))
    backend.load([part], source, lambda _progress: None)
    backend.allocate_kv(num_blocks=max(ROWS), block_size=16)
    return backend


def _step(backend: TorchBackend, hidden: int, count: int) -> Callable[[], float]:
    inputs: Any = np.full((count, hidden), 0x3C00, np.uint16)
    rows = tuple(
        StepRow(sequence=SequenceId(index), position=0, num_tokens=1, runs=(BlockRun(index, 1),))
        for index in range(count)
    )
    step = Step(step=StepId(1), slice_index=1, rows=rows, logit_rows=np.zeros(0, np.int32))

    def run() -> float:
        prepared = backend.prepare(step)
        begun_s = time.perf_counter()
        backend.collect(backend.submit(prepared, inputs))
        return time.perf_counter() - begun_s

    return run


def _prefill(rival: LlamaCpp, count: int) -> Callable[[], float]:
    return lambda: rival.prefill_s(count)


def _int4_matrices(config: ModelConfig) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Return random weights of a layer's matrices in int4pack's form: codes, scales and zeros, O, I."""
    found: list[tuple[torch.Tensor, torch.Tensor, int, int]] = []
    for shape in layer_tensors(config, 0).values():
        if len(shape) == 2:
            outputs, inputs = shape
            codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            scales = torch.full((inputs // _INT4_GROUP, outputs, 2), 0.01, dtype=torch.bfloat16)
            found.append((packed, scales, outputs, inputs))
    return found


def _int4_products(matrices: list[tuple[torch.Tensor, torch.Tensor, int, int]], count: int) -> Callable[[], float]:
    inputs = {size: torch.randn(count, size).to(torch.bfloat16) for *_, size in matrices}

    def run() -> float:
        begun_s = time.perf_counter()
        for codes, scales, _outputs, size in matrices:
            torch.ops.aten._weight_int4pack_mm_for_cpu(inputs[size], codes, _INT4_GROUP, scales)
        return time.perf_counter() - begun_s

    return run


def read_rate(threads: int) -> float:
    """Return bytes per second of reading memory with so many threads."""
    torch.set_num_threads(threads)
    data = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    taken: list[float] = []
    for _ in range(5):
        begun_s = time.perf_counter()
        data.sum()
        taken.append(time.perf_counter() - begun_s)
    return _READ_BYTES / min(taken)


def _gguf(source: PackedTinyModel, layers: int, path: Path) -> Path:
    """Write the first layers of a source with small tables; return ``path``."""
    config = source.config
    writer = GGUFWriter(path, "llama", use_temp_file=False)
    add_llama_shape(writer, layers)
    _add_vocabulary(writer)
    norm = np.ones(config.hidden_size, np.float32)
    table = random_raw("table", "Q4_K", (_VOCABULARY, config.hidden_size), np.random.default_rng(0))

    def add(name: str, scheme: str, data: np.ndarray, rows: int) -> None:
        writer.add_tensor(f"{name}.weight", data.reshape(rows, -1), raw_dtype=GGMLQuantizationType[scheme])

    for name in ("token_embd", "output"):
        add(name, "Q4_K", table.data, _VOCABULARY)
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
        for name, stored in _GGUF_NAMES.items():
            raw = source.read(f"model.layers.{layer}.{name}.weight")
            add(f"blk.{layer}.{stored}", raw.info.scheme, raw.data, raw.info.shape[0])
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: GGUFWriter) -> None:
    """Add a vocabulary of _VOCABULARY tokens, without which llama.cpp loads no model."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    more = _VOCABULARY - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"word{index}" for index in range(more))])
    writer.add_token_scores([0.0] * _VOCABULARY)
    writer.add_token_types([*types, *[TokenType.NORMAL] * more])
