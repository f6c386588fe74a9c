"""Model files for tests: tiny ones that are right, and raw ones whose every part can be wrong."""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layout import model_tensors
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.manifest import Manifest
from edgepipe.weights.tensor_folder import ShardWriter
from tests.support.models.specs import first_attention, first_dense, first_rope

DATA = Path(__file__).parents[2] / "data"
GOLDEN = DATA / "golden_smollm2.json"

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def hf_values(**changes: Any) -> dict[str, Any]:
    """A good ``config.json`` with changes; a value of None removes the key."""
    return {key: value for key, value in {**HF_CONFIG, **changes}.items() if value is not None}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors of a whole model."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in model_tensors(config).items()}


def write_hf_folder(folder: Path, values: Mapping[str, Any] | None = None, *, shards: int = 1) -> Path:
    """A model folder with ``config.json`` and float32 safetensors written by the safetensors package."""
    from safetensors.numpy import save_file

    values = values or hf_values()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = random_tensors(hf_config(values))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file of any header; ``length`` overrides what it says of the header's size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, *, dtype: str = "F32", shape: object = None) -> dict[str, Any]:
    """A header entry; the shape fits float32 unless given."""
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def gguf_string(text: str | bytes) -> bytes:
    """Length and bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_entry(key: str, kind: int, value: bytes) -> bytes:
    """One metadata entry of any type."""
    return gguf_string(key) + struct.pack("<I", kind) + value


def gguf_row(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One row of the tensor table; dims innermost first."""
    return gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    rows: tuple[bytes, ...] = (),
    entries: tuple[bytes, ...] = (),
    num_rows: int | None = None,
    num_entries: int | None = None,
    data: bytes = b"",
    alignment: int = 32,
) -> bytes:
    """A GGUF file put together by hand."""
    counts = (len(rows) if num_rows is None else num_rows, len(entries) if num_entries is None else num_entries)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(rows)
    return head + b"\0" * (-len(head) % alignment) + data


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """Hugging Face's names to GGUF's."""
    part = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    whole["lm_head.weight"] = "output.weight"
    names: dict[str, str] = {}
    for name in model_tensors(config):
        if name in whole:
            names[name] = whole[name]
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, _, kind = rest.rpartition(".")
        names[name] = f"blk.{layer}.{part[stem]}.{kind}"
    return names


def permute_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """What a converter to GGUF does to q and k of llama models."""
    shape = tensor.shape
    halves = tensor.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
    *,
    scheme: str = "F32",
    architecture: str = "llama",
    extra: Mapping[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
    tensors_per_part: int = 0,
    metadata_alone: bool = False,
    sampling: Mapping[str, float | int] | None = None,
    title: str = "",
) -> Path:
    """A GGUF file of the config, written by the ``gguf`` package; matrices quantised to ``scheme``.

    ``sampling``: recommended values below ``general.sampling.``; ``title``: ``general.name``.

    With ``tensors_per_part`` it is split; ``metadata_alone``: the first part has no tensors.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part, small_first_shard=metadata_alone)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(first_dense(config).inner)
    writer.add_head_count(first_attention(config).num_heads)
    writer.add_head_count_kv(first_attention(config).num_kv_heads)
    writer.add_key_length(first_attention(config).head_dim)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_rope_freq_base(first_rope(config).theta)
    writer.add_eos_token_id(2)
    for key, value in (sampling or {}).items():
        if isinstance(value, int):
            writer.add_int32(f"general.sampling.{key}", value)
        else:
            writer.add_float32(f"general.sampling.{key}", value)
    if title:
        writer.add_name(title)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
        writer.add_token_merges(["a b"])
        writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
        writer.add_bos_token_id(0)
    quant = gguf.GGMLQuantizationType[scheme]
    names = gguf_names(config)
    for name, tensor in tensors.items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = first_attention(config)
            tensor = permute_rows(tensor, heads.num_heads if ".q_proj." in name else heads.num_kv_heads)
        kind = quant if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), kind)
        writer.add_tensor(names[name], data, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_split_gguf(
    folder: Path, config: ModelConfig, *, stem: str = "tiny", seed: int = 0, tensors_per_part: int = 12, **options: Any
) -> list[Path]:
    """A split GGUF model of random tensors; its parts in order."""
    write_gguf(
        folder / f"{stem}.gguf", random_tensors(config, seed), config, tensors_per_part=tensors_per_part, **options
    )
    return sorted(folder.glob(f"{stem}-*-of-*.gguf"))


def smollm2_gguf(folder: Path) -> Path:
    """The real SmolLM2's metadata (tokenizer, template, shape) as a GGUF file without tensors."""
    path = folder / "smollm2_metadata.gguf"
    path.write_bytes(lzma.decompress((DATA / "smollm2_metadata.gguf.xz").read_bytes()))
    return path


TOKENS = ["<|begin|>", "<|im_end|>", "<unk>", *"abcdefgh", "Ġ", "ab"]


def source_folder(tmp_path: Path, *, tokenizer: bool = True, **changes: Any) -> Path:
    """A folder as people download them: sharded weights, texts, and files that are no data."""
    folder = write_hf_folder(tmp_path / "My Model", hf_values(**changes), shards=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "T{{ eos_token }}", "eos_token": "</s>"})
    )
    (folder / "evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_text("x")
    if tokenizer:
        Tokenizer.from_gguf(gguf_text()).save(folder / "tokenizer.json")
    return folder


def gguf_text() -> dict[str, object]:
    """GGUF metadata of a tiny byte-level tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
        "tokenizer.ggml.merges": ["a b"],
    }


def names(folder: Path) -> set[str]:
    """What stands in a folder."""
    return {path.name for path in folder.iterdir()}


def metadata_of(model: StoredModel) -> dict[str, bytes]:
    """The files that a peer gets beside tensors."""
    entries = model.manifest.metadata_files
    return {entry.name: model.read_file(entry.name, offset=0, num_bytes=entry.num_bytes).tobytes() for entry in entries}


def adopt(store: ModelStore, manifest: Manifest, metadata: Mapping[str, bytes]) -> StoredModel:
    """Take a peer's model in, as a daemon does."""
    with store.adoption(manifest) as adoption:
        for entry in manifest.metadata_files:
            with adoption.open(entry) as sink:
                sink.write(metadata[entry.name])
                sink.finish()
        adoption.finish()
    return store.resolve(manifest.model_id, manifest_hash=manifest.hash)


def write_tensor(writer: ShardWriter, name: str, chunks: Iterable[bytes], *, offset: int = 0) -> bool:
    """As a transfer does: the bytes from ``offset`` on; True once the tensor is complete and checked."""
    with writer.open(name) as sink:
        sink.seek(offset)
        for chunk in chunks:
            sink.write(chunk)
        return sink.finish()
