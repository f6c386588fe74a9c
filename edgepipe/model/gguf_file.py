"""Tensors of a GGUF file under Hugging Face's names, row-major, with q and k rows in Hugging Face's order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.model.config import MAX_HEAD_DIM
from edgepipe.model.file_bytes import read_at
from edgepipe.model.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from edgepipe.model.tensors import TensorInfo, TensorPlace

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
class _HeadCounts:
    """Head counts for un-permuting; only the architecture ``llama`` needs it."""

    query: int
    key: int


def hugging_face_name(name: str) -> str:
    """Translate ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; unknown names stay."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if not match or match.group(2) not in _PART:
        return name
    return f"model.layers.{int(match.group(1))}.{_PART[match.group(2)]}.{match.group(3)}"


class GgufFile:
    """Tensors of one GGUF file, read lazily; without the metadata."""

    def __init__(self, path: Path, places: Mapping[str, TensorPlace]) -> None:
        self._path = path
        self._places = places
        self._infos = {name: place.info for name, place in places.items()}

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors, by Hugging Face's name."""
        return self._infos

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read a tensor's blocks, rows in logical order. Raises ModelInvalid if the file is too short."""
        place = self._places[name]
        data = read_at(self._path, place.offset, place.info.num_bytes, what=f"tensor '{name}'")
        if place.permuted_heads is None:
            return data
        return unpermute_rows(data, place.info.shape[0], place.permuted_heads)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read a part of the result of ``read``. Raises ModelInvalid like ``read``."""
        place = self._places[name]
        if place.permuted_heads is not None:
            return self.read(name)[offset : offset + num_bytes]
        return read_at(self._path, place.offset + offset, num_bytes, what=f"tensor '{name}'")


def unpermute_rows(data: npt.NDArray[np.uint8], num_rows: int, num_heads: int) -> npt.NDArray[np.uint8]:
    """Reorder rows of interleaved rotary pairs to rows of halves, as Hugging Face rotates.

    llama.cpp's converter writes row ``(head, pair, half)`` where Hugging Face has ``(head, half, pair)``. A row's
    blocks stay together, so quantised rows move as bytes.
    """
    rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def read_rope_factors(path: Path, header: GgufHeader) -> tuple[float, ...]:
    """Read the divisors of the rotary pairs' frequencies; () if the file has none. Raises ModelInvalid."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.block.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_HEAD_DIM // 2:
        raise ModelInvalid(
            f"'{path.name}' has unusable rope factors",
            fact=f"they are {tensor.block.name} of shape {tensor.shape}; at most {MAX_HEAD_DIM // 2} in F32 are read",
        )
    values = read_at(path, tensor.offset, tensor.num_bytes, what=ROPE_FACTORS).view("<f4")
    return tuple(float(value) for value in values)


def open_gguf(path: Path) -> tuple[GgufHeader, GgufFile]:
    """Open a GGUF file: header and tensors. Raises ModelInvalid."""
    header = read_gguf_header(path)
    return header, GgufFile(path, tensor_places(header, file=path.name))


def tensor_places(header: GgufHeader, *, file: str) -> dict[str, TensorPlace]:
    """Return the tensors' places by Hugging Face's name; ``file``: name for errors. Raises ModelInvalid."""
    heads = _head_counts(file, header)
    places: dict[str, TensorPlace] = {}
    for tensor in header.tensors.values():
        place = _place(tensor, heads)
        if place.info.name in places:
            raise ModelInvalid(f"'{file}' contradicts itself", fact=f"it has '{place.info.name[:80]}' under two names")
        if tensor.name != ROPE_FACTORS:
            places[place.info.name] = place
    return places


def _head_counts(file: str, header: GgufHeader) -> _HeadCounts | None:
    if header.metadata.get("general.architecture") != "llama":
        return None
    query = header.metadata.get("llama.attention.head_count")
    key = header.metadata.get("llama.attention.head_count_kv", query)
    counts = _HeadCounts(query=query, key=key) if isinstance(query, int) and isinstance(key, int) else None
    if counts is None or counts.query < 1 or counts.key < 1:
        raise ModelInvalid(
            f"'{file}' does not say how many heads it has",
            fact=f"integers are needed, it has {type(query).__name__} and {type(key).__name__}",
        )
    for tensor in header.tensors.values():
        match = _QUERY_KEY.fullmatch(tensor.name)
        heads = counts.query if match and match.group(1) == "q" else counts.key
        if match and tensor.shape[0] % (2 * heads):
            raise ModelInvalid(
                f"'{file}' contradicts itself",
                fact=f"'{tensor.name}' {tensor.shape} has no even rows for {heads} heads",
            )
    return counts


def _place(tensor: GgufTensor, heads: _HeadCounts | None) -> TensorPlace:
    info = TensorInfo(
        name=hugging_face_name(tensor.name),
        shape=tensor.shape,
        scheme=tensor.block.name,
        num_bytes=tensor.num_bytes,
        rounded=True,
    )
    match = _QUERY_KEY.fullmatch(tensor.name)
    if heads is None or match is None:
        return TensorPlace(info=info, offset=tensor.offset)
    return TensorPlace(info=info, offset=tensor.offset, permuted_heads=heads.query if match[1] == "q" else heads.key)
