"""Tensors of a GGUF model under Hugging Face's names, row-major, with q and k rows in Hugging Face's order.

A model is one file or several (``gguf_split.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.files.file_bytes import read_at
from edgepipe.spec.families import FAMILIES
from edgepipe.spec.families.reading import is_list
from edgepipe.spec.layout import is_exact, is_norm
from edgepipe.spec.rope_config import ROPE_FACTORS
from edgepipe.spec.shape_limits import MAX_HEAD_DIM
from edgepipe.spec.stored_types import FLOAT_TYPES
from edgepipe.spec.tensors import TensorInfo, TensorPlace
from edgepipe.weights.gguf_header import GgufHeader, GgufTensor, GgufValue, read_gguf_header
from edgepipe.weights.gguf_split import check_parts, part_paths
from edgepipe.weights.permuted_rows import PermutedRows

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.norm.weight",  # LFM2's last norm, in spite of its name
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
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_latent_down": "mlp.latent_in",
    "ffn_latent_up": "mlp.latent_out",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
_WITHOUT_SUFFIX = ("ssm_a", "ssm_d")
_OF_EXPERTS = ("ffn_gate", "ffn_up", "ffn_down")  # early files name the matrices of one expert so
_BARE = {  # these have no suffix here
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.router.correction",
    "ffn_gate_inp.scale": "mlp.router.input_scale",
    "ffn_down_exps.scale": "mlp.router.expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}
_LAYER = re.compile(  # experts have a number; states' decays have no suffix
    r"blk\.(\d{1,5})\.((?:shortconv\.|nextn\.)?[a-z_12]{1,40})(?:\.(\d{1,4}))?(?:\.(weight|bias|scale))?"
)
_QUERY_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCounts:
    """Head counts for un-permuting."""

    query: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufNames:
    """What an architecture's files do in a way of their own."""

    parts: Mapping[str, str]  # names within a layer
    heads: HeadCounts | None  # None: q and k rows are in Hugging Face's order


def hugging_face_name(name: str, parts: Mapping[str, str] = _PART) -> str:
    """Translate ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; unknown names stay."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if not match:
        return name
    layer, part, expert, suffix = match.groups()
    found = _within_layer(part, suffix, parts)
    if expert is not None:
        found = found.replace("mlp.", f"mlp.experts.{int(expert)}.") if part in _OF_EXPERTS else ""
    return f"model.layers.{int(layer)}.{found}" if found else name


def _within_layer(part: str, suffix: str | None, parts: Mapping[str, str]) -> str:
    """Return the name within the layer; empty if it is unknown. ``parts`` may name a part with its suffix."""
    if suffix is None:
        return parts.get(part, "") if part in _WITHOUT_SUFFIX else ""
    whole = f"{part}.{suffix}"
    return _BARE.get(whole) or parts.get(whole) or (f"{parts[part]}.{suffix}" if part in parts else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlace:
    """Position of a tensor's bytes in one of a model's files."""

    file: str
    place: TensorPlace


class JoinedGguf:
    """The headers of a model's files as one: metadata of the first, tensors of all."""

    def __init__(self, headers: Mapping[str, GgufHeader]) -> None:
        """``headers``: by file name, in order. Raises ModelInvalid if they are not one model."""
        check_parts(headers)
        first_name, first = next(iter(headers.items()))
        names = gguf_names(first.metadata, file=first_name)
        self.metadata: Mapping[str, GgufValue] = first.metadata
        self.tensors: dict[str, tuple[str, GgufTensor]] = {}  # file and description, by GGUF's name
        self.places: dict[str, GgufPlace] = {}  # place of each tensor by Hugging Face's name
        for file, header in headers.items():
            self.tensors |= {name: (file, tensor) for name, tensor in header.tensors.items()}
            for name, place in tensor_places(header, names, file=file).items():
                if name in self.places:
                    raise _under_two_names(file, name)
                self.places[name] = GgufPlace(file=file, place=place)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Row-major shapes by GGUF's name."""
        return {name: tensor.shape for name, (_, tensor) in self.tensors.items()}

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """All tensors, by Hugging Face's name."""
        return {name: found.place.info for name, found in self.places.items()}


class GgufFiles:
    """Tensors of one GGUF model, read lazily; without the tokenizer."""

    def __init__(self, folder: Path, joined: JoinedGguf) -> None:
        self._folder = folder
        self._places = joined.places
        self._infos = joined.infos

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors, by Hugging Face's name."""
        return self._infos

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read a tensor's blocks, rows in logical order. Raises ModelInvalid if the file is too short."""
        return self.read_range(name, 0, self._infos[name].num_bytes)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read a part of the result of ``read``, and at most twice its rows. Raises ModelInvalid like ``read``."""
        path, place = self._place(name)
        at = place.offset
        what = f"tensor '{name}'"
        if place.permuted_heads is None:
            return read_at(path, at + offset, num_bytes, what=what)
        rows = PermutedRows.of(place.info, place.permuted_heads)
        return rows.read(offset, num_bytes, lambda start, count: read_at(path, at + start, count, what=what))

    def _place(self, name: str) -> tuple[Path, TensorPlace]:
        found = self._places[name]
        return self._folder / found.file, found.place


def read_rope_factors(folder: Path, joined: JoinedGguf) -> dict[str, tuple[float, ...]]:
    """Read the divisors of the rotary pairs' frequencies, by tensor. Raises ModelInvalid."""
    found = {name: joined.tensors[name] for name in ROPE_FACTORS if name in joined.tensors}
    return {name: _factors(folder, file, tensor) for name, (file, tensor) in found.items()}


def expected_rope_factors(joined: JoinedGguf) -> dict[str, tuple[float, ...]]:
    """Return factors that change nothing in place of those of files that are not here yet. Raises ModelInvalid."""
    found = {name: joined.tensors[name] for name in ROPE_FACTORS if name in joined.tensors}
    for file, tensor in found.values():
        _check_factors(file, tensor)
    return {name: (1.0,) * tensor.shape[0] for name, (_, tensor) in found.items()}


def _factors(folder: Path, file: str, tensor: GgufTensor) -> tuple[float, ...]:
    _check_factors(file, tensor)
    values = read_at(folder / file, tensor.offset, tensor.num_bytes, what=tensor.name).view("<f4")
    return tuple(float(value) for value in values)


def _check_factors(file: str, tensor: GgufTensor) -> None:
    if tensor.block.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_HEAD_DIM // 2:
        raise ModelInvalid(
            f"'{file}' has unusable rope factors",
            fact=f"they are {tensor.block.name} of shape {tensor.shape}; at most {MAX_HEAD_DIM // 2} in F32 are read",
        )


def open_gguf(path: Path) -> tuple[JoinedGguf, GgufFiles]:
    """Open a GGUF model by its file, or by any of its parts. Raises ModelInvalid."""
    joined = JoinedGguf({part.name: read_gguf_header(part) for part in part_paths(path)})
    return joined, GgufFiles(path.parent, joined)


def tensor_places(header: GgufHeader, names: GgufNames, *, file: str) -> dict[str, TensorPlace]:
    """Return the places of one file's tensors by Hugging Face's name.

    ``file``: name for errors. Raises ModelInvalid.
    """
    places: dict[str, TensorPlace] = {}
    for tensor in header.tensors.values():
        place = _place(tensor, names, file)
        if place.info.name in places:
            raise _under_two_names(file, place.info.name)
        if tensor.name not in ROPE_FACTORS:  # they are a part of the config
            places[place.info.name] = place
    return places


def gguf_names(metadata: Mapping[str, GgufValue], *, file: str) -> GgufNames:
    """Return the names and the order of rows in a model's files, from its metadata. Raises ModelInvalid."""
    arch = metadata.get("general.architecture")
    known = arch if isinstance(arch, str) else ""  # a hostile file may hold an array
    family = next((family for family in FAMILIES if family.gguf and family.gguf == known), None)
    if family is None:
        return GgufNames(parts=_PART, heads=None)
    heads = _head_counts(metadata, family.gguf, file) if family.gguf_permuted else None
    return GgufNames(parts={**_PART, **family.gguf_parts}, heads=heads)


def _head_counts(metadata: Mapping[str, GgufValue], arch: str, file: str) -> HeadCounts:
    query = _of_all_layers(metadata.get(f"{arch}.attention.head_count"))
    key = _of_all_layers(metadata.get(f"{arch}.attention.head_count_kv", query))
    counts = HeadCounts(query=query, key=key) if isinstance(query, int) and isinstance(key, int) else None
    if counts is None or counts.query < 1 or counts.key < 1:
        raise ModelInvalid(
            f"'{file}' does not say how many heads it has",
            fact=f"'{arch}.attention.head_count' and head_count_kv: integers are needed, it has {query!r} and {key!r}",
        )
    return counts


def _of_all_layers(value: object) -> object:
    """Return the number that a list repeats for every layer that has one; anything else as it is."""
    items = [item for item in Fields({"": value}, what="").items("") if item != 0] if is_list(value) else []
    return items[0] if items and all(item == items[0] for item in items) else value


def _joined_experts(tensor: GgufTensor) -> tuple[int, ...]:
    """Return a tensor's shape, with the experts' or heads' rows below one another: [E, out, in] is [E * out, in]."""
    of_heads = len(tensor.shape) == 3 and tensor.name.endswith((".attn_k_b.weight", ".attn_v_b.weight"))
    if not of_heads and ("_exps." not in tensor.name or len(tensor.shape) < 2):
        return tensor.shape
    inner = tensor.shape[2:] if tensor.name.endswith(".weight") else ()
    return (tensor.shape[0] * tensor.shape[1], *inner)


def _under_two_names(file: str, name: str) -> ModelInvalid:
    return ModelInvalid(f"'{file}' contradicts itself", fact=f"it has '{name[:80]}' under two names")


def _place(tensor: GgufTensor, names: GgufNames, file: str) -> TensorPlace:
    heads, name = names.heads, hugging_face_name(tensor.name, names.parts)
    info = TensorInfo(
        name=name,
        shape=_joined_experts(tensor),
        scheme=tensor.block.name,
        num_bytes=tensor.num_bytes,
        rounded=tensor.block.name not in FLOAT_TYPES and not (is_exact(name) or is_norm(name)),
    )
    match = _QUERY_KEY.fullmatch(tensor.name)
    if heads is None or match is None:
        return TensorPlace(info=info, offset=tensor.offset)
    num_heads = heads.query if match[1] == "q" else heads.key
    if tensor.shape[0] % (2 * num_heads) or tensor.num_bytes % tensor.shape[0]:
        raise ModelInvalid(
            f"'{file}' contradicts itself",
            fact=f"'{tensor.name}' {tensor.shape} has no even rows for {num_heads} heads",
        )
    return TensorPlace(info=info, offset=tensor.offset, permuted_heads=num_heads)
