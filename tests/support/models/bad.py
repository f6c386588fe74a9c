"""Model folders and files that are wrong in one way each, made from a small one that is right."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from edgepipe.spec.config import hf_config
from edgepipe.spec.layout import model_tensors
from edgepipe.weights.emulated_folder import byte_level_tokenizer

CONFIG: dict[str, Any] = {
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
    "eos_token_id": 257,
}
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class BadModel:
    """How to spoil a good folder (or make a file beside it), and a word that the error must say."""

    spoil: Callable[[Path], Path]  # the source to pull
    says: str


def good_folder(folder: Path) -> Path:
    """A Llama of three layers with float32 weights and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_level_tokenizer(300).save(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(1)
    tensors = {name: draw.random(shape, np.float32) for name, shape in model_tensors(hf_config(CONFIG)).items()}
    save_file(tensors, folder / WEIGHTS)
    return folder


def large_folder(folder: Path) -> Path:
    """A model of 2.5 GB that takes no room: a file of zeros that nobody wrote. Hashing it takes seconds."""
    values = CONFIG | {"hidden_size": 2048, "vocab_size": 150_000}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    head: dict[str, Any] = {}
    end = 0
    for name, shape in model_tensors(hf_config(values)).items():
        begin, end = end, end + 4 * int(np.prod(shape))
        head[name] = entry(begin, end, list(shape))
    raw = json.dumps(head).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    return folder


def config(**changes: Any) -> Callable[[Path], Path]:
    """``config.json`` with other values."""

    def spoil(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(CONFIG | changes))
        return folder

    return spoil


def text(name: str, content: str | bytes) -> Callable[[Path], Path]:
    """A file with other content."""

    def spoil(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return spoil


def header(head: object, data: bytes = b"", *, length: int | None = None) -> Callable[[Path], Path]:
    """Weights with a safetensors header written by hand."""
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    return text(WEIGHTS, struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], Path]:
    """Weights of which some are missing, added or of another shape."""

    def spoil(folder: Path) -> Path:
        values: dict[str, Any] = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS)
        return folder

    return spoil


def cut_weights(folder: Path) -> Path:
    """A download that broke off."""
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    return folder


def linked_weights(folder: Path) -> Path:
    """Weights that are a link to somewhere else."""
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")
    return folder


def large_tokenizer(folder: Path) -> Path:
    """A gigabyte that takes no room."""
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)
    return folder


def slow_tokenizer(folder: Path) -> Path:
    """A pattern whose matching takes exponential time."""
    value = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern, value["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder


def gguf(*parts: bytes, version: int = 3, tensors: int = 0, entries: int = 0) -> Callable[[Path], Path]:
    """A GGUF file put together by hand."""

    def spoil(folder: Path) -> Path:
        path = folder / "bad.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts))
        return path

    return spoil


def gguf_text(value: str) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_row(dims: tuple[int, ...], *, kind: int = 0, offset: int = 0) -> bytes:
    """One row of a GGUF file's table of tensors."""
    return gguf_text("x") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_number(key: str, value: int) -> bytes:
    """A GGUF entry that holds an unsigned number."""
    return gguf_text(key) + struct.pack("<II", 4, value)


_NORM = "model.norm.weight"
_STRING = 8
_INDEX = "model.safetensors.index.json"

BAD_MODELS: dict[str, BadModel] = {
    "M1 header of size 0": BadModel(header(b"", length=0), "model.safetensors"),
    "M1 header of 2^63": BadModel(header(b"{}", length=1 << 63), "model.safetensors"),
    "M2 no JSON": BadModel(header(b"nonsense"), "model.safetensors"),
    "M2 deep": BadModel(header(b"[" * 100_000), "model.safetensors"),
    "M3 overlap": BadModel(header({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, bytes(24)), "model.safetensors"),
    "M3 beyond": BadModel(header({"a": entry(0, 1 << 40, [1 << 38])}, bytes(16)), "model.safetensors"),
    "M4 shape": BadModel(header({"a": entry(0, 16, [1 << 32, 1 << 32, 4])}, bytes(16)), "model.safetensors"),
    "M5 names twice": BadModel(
        header(b'{"a":' + json.dumps(entry(0, 4, [1])).encode() + b',"a":3}', bytes(4)), "model.safetensors"
    ),
    "M6 a million empty": BadModel(
        header({str(i): entry(0, 0, [0]) for i in range(1_000_000)}),
        "model.safetensors",
    ),
    "M7 missing": BadModel(tensors(lambda values: values.pop(_NORM)), "missing: model.norm.weight"),
    "M7 extra": BadModel(tensors(lambda values: values.update(strange=np.zeros(3, np.float32))), "extra: strange"),
    "M7 shape": BadModel(
        tensors(lambda values: values.update({_NORM: np.zeros(31, np.float32)})), "[31] instead of [32]"
    ),
    "M8 cut": BadModel(cut_weights, "model.safetensors"),
    "M9 magic": BadModel(lambda folder: text("bad.gguf", b"GGML" + bytes(60))(folder) / "bad.gguf", "bad.gguf"),
    "M9 version": BadModel(gguf(version=99), "99"),
    "M10 counts": BadModel(gguf(entries=1 << 63), "bad.gguf"),
    "M11 string": BadModel(gguf(gguf_text("k"), struct.pack("<IQ", _STRING, 1 << 61), entries=1), "bad.gguf"),
    "M12 beyond": BadModel(gguf(gguf_row((32,), offset=1 << 40), bytes(256), tensors=1), "bad.gguf"),
    "M13 wraps": BadModel(gguf(gguf_row((1 << 32, 1 << 32, 4)), bytes(256), tensors=1), "bad.gguf"),
    "M14 type": BadModel(gguf(gguf_row((32,), kind=255), bytes(256), tensors=1), "bad.gguf"),
    "M14 alignment": BadModel(gguf(gguf_number("general.alignment", 3), entries=1), "bad.gguf"),
    "M15 path": BadModel(
        text(_INDEX, json.dumps({"weight_map": {"a": "../../etc/passwd"}})), "outside of the model's folder"
    ),
    "M15 link": BadModel(linked_weights, "link"),
    "M16 no layers": BadModel(config(num_hidden_layers=0), "num_hidden_layers"),
    "M16 NaN": BadModel(config(rms_norm_eps=float("nan")), "config.json"),
    "M16 text": BadModel(config(hidden_size="32"), "hidden_size"),
    "M16 code": BadModel(config(auto_map={"AutoModelForCausalLM": "evil.Model"}), "auto_map"),
    "M16 heads": BadModel(config(num_attention_heads=5), "5 heads"),
    "M17 large": BadModel(large_tokenizer, "tokenizer.json"),
    "M17 pattern": BadModel(slow_tokenizer, "tokenizer.json"),
    "M17 ids": BadModel(
        lambda folder: (byte_level_tokenizer(400).save(str(folder / "tokenizer.json")), folder)[1], "token id"
    ),
    "contradiction": BadModel(config(num_hidden_layers=4), "missing: model.layers.3"),
    "contradicting vocabulary": BadModel(config(vocab_size=301), "instead of [301, 32]"),
    "architecture": BadModel(config(architectures=["Llama4ForCausalLM"]), "the nearest is LlamaForCausalLM"),
    "no architecture": BadModel(config(architectures=[]), "supported: Llama, "),
    "no weights": BadModel(lambda folder: ((folder / WEIGHTS).unlink(), folder)[1], "safetensors"),
    "no JSON": BadModel(text("config.json", "{"), "config.json"),
}
"""Each family of reliability cases for model files, and what people meet most."""
