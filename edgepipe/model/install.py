"""Turns a folder of fetched files into a stored model: checked, described in ``edgepipe.json``, hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.model.card import TOKENIZER_FILE, ModelCard
from edgepipe.model.facts import ModelConfig
from edgepipe.model.gguf_header import read_gguf_header
from edgepipe.model.manifest import CARD_FILE, MANIFEST_FILE, MAX_METADATA_BYTES, FileEntry, Manifest, TensorEntry
from edgepipe.model.progress import OnProgress, ProgressCounter
from edgepipe.model.safetensors_file import INDEX_FILE, shard_names
from edgepipe.model.template import ChatTemplate, gguf_template, hf_template
from edgepipe.model.tokenizer import Tokenizer, check_tokenizer
from edgepipe.model.weights import GGUF_FILE, Weights, is_emulated, open_gguf_weights, open_hf_weights
from edgepipe.units import format_bytes

HASH_CHUNK_BYTES = 4 << 20
METADATA_NAMES = (
    "config.json",
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX_FILE,
)
"""The files beside the weights that are taken from a source; nothing else is."""

_SHARED = (CARD_FILE, TOKENIZER_FILE)  # what a node that gets tensors from a peer needs


def check_metadata_size(name: str, num_bytes: int) -> None:
    """Refuse a file beside the weights before it is fetched. Raises ModelInvalid if none so large is read."""
    if name in METADATA_NAMES and num_bytes > MAX_METADATA_BYTES:
        raise ModelInvalid(
            f"'{name}' is too large",
            fact=f"{format_bytes(num_bytes)}, at most {format_bytes(MAX_METADATA_BYTES)} are read",
        )


def install(folder: Path, *, model_id: str, source: str, on_progress: OnProgress) -> Manifest:
    """Check the files in ``folder`` and add ``edgepipe.json``, ``tokenizer.json`` and ``manifest.json``.

    Reads every byte once or twice. Raises ModelInvalid, ArchitectureUnsupported.
    """
    gguf = folder / GGUF_FILE
    weights = open_gguf_weights(gguf) if gguf.is_file() else open_hf_weights(folder)
    template = _install_gguf_text(folder, gguf) if gguf.is_file() else hf_template(folder)
    config = _with_ends(folder, weights.config)
    emulated = not gguf.is_file() and is_emulated(folder)
    card = ModelCard(config=config, template=template, emulated=emulated)
    (folder / CARD_FILE).write_bytes(card.to_json())
    manifest = Manifest(
        model_id=model_id,
        source=source,
        tensors=_hash_tensors(weights, on_progress),
        files=_hash_files(folder, _weight_files(folder, emulated=emulated), on_progress),
    )
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    return manifest


def hash_file(path: Path, on_bytes: ProgressCounter | None = None) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in file_chunks(path):
        digest.update(chunk)
        if on_bytes is not None:
            on_bytes.add(path.name, len(chunk))
    return digest.hexdigest()


def file_chunks(path: Path) -> Iterator[bytes]:
    """A file's bytes in order."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            yield chunk


def _install_gguf_text(folder: Path, gguf: Path) -> ChatTemplate:
    """Write ``tokenizer.json`` from GGUF metadata and give the templates that stand there."""
    from edgepipe.model.gguf_tokenizer import special_tokens

    metadata = read_gguf_header(gguf).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return gguf_template(metadata, {})
    Tokenizer.from_gguf(metadata).save(folder / TOKENIZER_FILE)
    return gguf_template(metadata, special_tokens(metadata))


def _with_ends(folder: Path, config: ModelConfig) -> ModelConfig:
    """Try the tokenizer where there is one, and add the chat ends that it knows."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return config
    check_tokenizer(path, vocab_size=config.vocab_size)
    tokenizer = Tokenizer.from_file(path, vocab_size=config.vocab_size)
    return replace(config, eos_token_ids=tokenizer.end_ids(config.eos_token_ids))


def _hash_tensors(weights: Weights, on_progress: OnProgress) -> tuple[TensorEntry, ...]:
    infos = weights.infos.values()
    counter = ProgressCounter(on_progress, "hash", sum(info.num_bytes for info in infos))
    entries: list[TensorEntry] = []
    for info in infos:
        digest = hashlib.sha256(weights.read(info.name).data.data)
        counter.add(info.name, info.num_bytes)
        entries.append(TensorEntry(info=info, sha256=digest.hexdigest()))
    return tuple(entries)


def _weight_files(folder: Path, *, emulated: bool) -> tuple[str, ...]:
    if emulated:
        return ()
    return (GGUF_FILE,) if (folder / GGUF_FILE).is_file() else shard_names(folder)


def _hash_files(folder: Path, weight_files: tuple[str, ...], on_progress: OnProgress) -> tuple[FileEntry, ...]:
    names = [name for name in (CARD_FILE, *METADATA_NAMES) if (folder / name).is_file()]
    sizes = {name: (folder / name).stat().st_size for name in (*names, *weight_files)}
    counter = ProgressCounter(on_progress, "check", sum(sizes.values()))
    return tuple(
        FileEntry(name=name, num_bytes=size, sha256=hash_file(folder / name, counter), metadata=name in _SHARED)
        for name, size in sizes.items()
    )


def check_card(folder: Path, card: ModelCard) -> None:
    """Try what a peer sent as metadata. Raises ModelInvalid if the tokenizer cannot be used."""
    path = folder / TOKENIZER_FILE
    if path.is_file():
        check_tokenizer(path, vocab_size=card.config.vocab_size)
