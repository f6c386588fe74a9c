"""The tensors of a GGUF file under Hugging Face's names, row-major, q and k rows in Hugging Face's order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.model.file_bytes import read_at
from edgepipe.model.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from edgepipe.model.tensors import TensorInfo

ROPE_FACTORS = "rope_freqs.weight"  # per rotary pair; part of the config, not of the weights

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PART = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.([a-z_]{1,40})\.(weight|bias)")
_QUERY_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCounts:
    """What un-permuting needs; given for the architecture ``llama`` only."""

    query: int
    key: int


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; names unknown here stay as they are."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if not match or match.group(2) not in _PART:
        return name
    return f"model.layers.{int(match.group(1))}.{_PART[match.group(2)]}.{match.group(3)}"


class GgufFile:
    """The tensors of one GGUF file, read lazily. The metadata is not kept."""

    def __init__(self, path: Path, header: GgufHeader, heads: HeadCounts | None) -> None:
        self._path = path
        self._heads = heads
        self._tensors = {
            hugging_face_name(name): tensor for name, tensor in header.tensors.items() if name != ROPE_FACTORS
        }
        self._infos = {name: _info(name, tensor) for name, tensor in self._tensors.items()}

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face's name."""
        return self._infos

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """A whole tensor's blocks, rows in logical order. Raises ModelInvalid if the file is shorter than promised."""
        tensor = self._tensors[name]
        data = read_at(self._path, tensor.offset, tensor.num_bytes, what=f"tensor '{tensor.name}'")
        heads = self._num_permuted_heads(tensor)
        return data if heads is None else unpermute_rows(data, tensor.shape[0], heads)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Part of what ``read`` gives. Raises ModelInvalid as ``read``."""
        tensor = self._tensors[name]
        if self._num_permuted_heads(tensor) is not None:
            return self.read(name)[offset : offset + num_bytes]
        return read_at(self._path, tensor.offset + offset, num_bytes, what=f"tensor '{tensor.name}'")

    def _num_permuted_heads(self, tensor: GgufTensor) -> int | None:
        match = _QUERY_KEY.fullmatch(tensor.name)
        if self._heads is None or match is None:
            return None
        return self._heads.query if match.group(1) == "q" else self._heads.key


def unpermute_rows(data: npt.NDArray[np.uint8], num_rows: int, num_heads: int) -> npt.NDArray[np.uint8]:
    """Rows of interleaved rotary pairs to rows of halves, the way Hugging Face rotates.

    llama.cpp's converter writes row ``(head, pair, half)`` where Hugging Face has ``(head, half, pair)``. A row's
    blocks stay together, so quantised rows move as bytes.
    """
    rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def read_rope_factors(path: Path, header: GgufHeader) -> tuple[float, ...]:
    """Factors by which each rotary pair's frequency is divided, or (). Raises ModelInvalid."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.block.name != "F32" or len(tensor.shape) != 1:
        raise ModelInvalid(f"'{path.name}' has rope factors that cannot be used", fact=f"they are {tensor.block.name}")
    values = read_at(path, tensor.offset, tensor.num_bytes, what=ROPE_FACTORS).view("<f4")
    return tuple(float(value) for value in values)


def open_gguf(path: Path) -> tuple[GgufHeader, GgufFile]:
    """Header and tensors of a GGUF file. Raises ModelInvalid."""
    header = read_gguf_header(path)
    return header, GgufFile(path, header, _head_counts(path, header))


def _head_counts(path: Path, header: GgufHeader) -> HeadCounts | None:
    if header.metadata.get("general.architecture") != "llama":
        return None
    query = header.metadata.get("llama.attention.head_count")
    key = header.metadata.get("llama.attention.head_count_kv", query)
    counts = HeadCounts(query=query, key=key) if isinstance(query, int) and isinstance(key, int) else None
    if counts is None or counts.query < 1 or counts.key < 1:
        raise ModelInvalid(f"'{path.name}' does not say how many heads it has", fact=f"{query=}, {key=}")
    for tensor in header.tensors.values():
        match = _QUERY_KEY.fullmatch(tensor.name)
        heads = counts.query if match and match.group(1) == "q" else counts.key
        if match and tensor.shape[0] % (2 * heads):
            raise ModelInvalid(
                f"'{path.name}' contradicts itself",
                fact=f"'{tensor.name}' {tensor.shape} has no even rows for {heads} heads",
            )
    return counts


def _info(name: str, tensor: GgufTensor) -> TensorInfo:
    return TensorInfo(name=name, shape=tensor.shape, scheme=tensor.block.name, num_bytes=tensor.num_bytes, rounded=True)
