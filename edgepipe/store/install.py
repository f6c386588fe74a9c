"""Turn a folder of fetched files into a stored model: check, describe in ``edgepipe.json``, hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.files.progress import OnProgress, ProgressCounter
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.sampling_defaults import GENERATION_FILE, gguf_sampling, hf_sampling
from edgepipe.text.conversations.known_traits import model_traits
from edgepipe.text.template import ChatTemplate, gguf_template, hf_template
from edgepipe.text.tokenizer import Tokenizer, check_tokenizer
from edgepipe.units import format_bytes
from edgepipe.weights.card import ModelCard, read_card
from edgepipe.weights.gguf_header import GgufValue, read_gguf_header
from edgepipe.weights.gguf_split import gguf_in, stored_gguf
from edgepipe.weights.manifest import (
    CARD_FILE,
    MANIFEST_FILE,
    MAX_METADATA_BYTES,
    METADATA_LIMITS,
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    TensorEntry,
)
from edgepipe.weights.safetensors_file import INDEX_FILE, shard_names
from edgepipe.weights.weights import Weights, emulated_mix, is_emulated, open_gguf_weights, open_hf_weights

HASH_CHUNK_BYTES = 4 << 20
METADATA_NAMES = (
    "config.json",
    GENERATION_FILE,
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
)
"""All files besides the weights that are taken from a source."""


def check_metadata_size(name: str, num_bytes: int) -> None:
    """Check the size of a metadata file before it is fetched. Raises ModelInvalid if it is too large to read."""
    if name in METADATA_NAMES and num_bytes > MAX_METADATA_BYTES:
        raise ModelInvalid(
            f"'{name}' is too large",
            fact=f"{format_bytes(num_bytes)}, at most {format_bytes(MAX_METADATA_BYTES)} are read",
        )


def install(folder: Path, *, model_id: str, source: str, on_progress: OnProgress) -> Manifest:
    """Check the files in ``folder`` and add ``edgepipe.json``, ``tokenizer.json`` and ``manifest.json``.

    Reads every byte once or twice. Raises ModelInvalid, ArchitectureUnsupported.
    """
    gguf = gguf_in(folder)
    weights = open_gguf_weights(gguf) if gguf else open_hf_weights(folder)
    metadata = read_gguf_header(gguf).metadata if gguf else None
    template = hf_template(folder) if metadata is None else _install_gguf_text(folder, metadata)
    sampling = hf_sampling(folder) if metadata is None else gguf_sampling(metadata, name=model_id)
    tokenizer = _tokenizer_content(folder, weights.config)
    config = _with_ends(folder, weights.config)
    emulated = gguf is None and is_emulated(folder)
    mix = emulated_mix(folder) if emulated else ""
    card = ModelCard(config=config, template=template, emulated=emulated, mix=mix, sampling=sampling)
    (folder / CARD_FILE).write_bytes(card.to_json())
    contents = {CARD_FILE: read_card(folder).digest, **tokenizer}
    manifest = Manifest(
        model_id=model_id,
        source=source,
        tensors=_hash_tensors(weights, on_progress),
        files=_hash_files(folder, contents, _weight_files(folder, emulated=emulated), on_progress),
    )
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    model_traits(folder, template)  # now, so that no chat waits for them
    return manifest


def metadata_contents(folder: Path) -> dict[str, str]:
    """Return digests of the canonical forms of a folder's metadata files, by name.

    Raises ModelInvalid if the card or the tokenizer is unusable.
    """
    card = read_card(folder)
    return {CARD_FILE: card.digest, **_tokenizer_content(folder, card.config)}


def hash_file(path: Path, on_bytes: ProgressCounter | None = None) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in file_chunks(path):
        digest.update(chunk)
        if on_bytes is not None:
            on_bytes.add(path.name, len(chunk))
    return digest.hexdigest()


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in order."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            yield chunk


def _install_gguf_text(folder: Path, metadata: Mapping[str, GgufValue]) -> ChatTemplate:
    """Write ``tokenizer.json`` from GGUF metadata and return the metadata's templates."""
    from edgepipe.text.gguf_tokenizer import special_tokens

    if "tokenizer.ggml.tokens" not in metadata:
        return gguf_template(metadata, {})
    Tokenizer.from_gguf(metadata).save(folder / TOKENIZER_FILE)
    return gguf_template(metadata, special_tokens(metadata))


def _tokenizer_content(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Check the tokenizer if there is one. Return the digest of its canonical form by its name."""
    path = folder / TOKENIZER_FILE
    return {TOKENIZER_FILE: check_tokenizer(path, vocab_size=config.vocab_size)} if path.is_file() else {}


def _with_ends(folder: Path, config: ModelConfig) -> ModelConfig:
    """Add the tokenizer's chat end tokens to the config."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return config
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
    return stored_gguf(path.name for path in folder.iterdir()) or shard_names(folder)


def _hash_files(
    folder: Path, contents: Mapping[str, str], weight_files: tuple[str, ...], on_progress: OnProgress
) -> tuple[FileEntry, ...]:
    names = [name for name in (CARD_FILE, *METADATA_NAMES) if (folder / name).is_file()]
    sizes = {name: (folder / name).stat().st_size for name in (*names, *weight_files)}
    counter = ProgressCounter(on_progress, "check", sum(sizes.values()))
    return tuple(
        FileEntry(
            name=name,
            num_bytes=size,
            sha256=hash_file(folder / name, counter),
            metadata=name in METADATA_LIMITS,
            content=contents.get(name, ""),
        )
        for name, size in sizes.items()
    )
