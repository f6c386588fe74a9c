"""Name GGUF files on this machine's disk: plain ones, parts of split ones, and blobs of Ollama.

Ollama keeps a model's file as ``models/blobs/sha256-DIGEST``, without a suffix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.units import format_bytes
from edgepipe.weights.gguf_header import is_gguf, read_gguf_header
from edgepipe.weights.gguf_split import part_name

_BLOB = re.compile(r"sha256[-:](?P<digest>[0-9a-f]{12,64})")
_OTHER = re.compile(r"[^a-z0-9._]+")  # characters that names do not have
_DIGEST_CHARS = 8  # digits of a blob's digest that its model's name has
_MAX_FILES = 10_000  # most files of a folder that are opened
_SHOWN = 3
_NO_MODELS = ("clip", "")  # architectures: projectors, and files without one


def gguf_title(path: Path) -> str:
    """Return the name of a GGUF file's model: the file's name, for a blob the name in its metadata.

    Raises ModelInvalid for a damaged blob.
    """
    blob = _BLOB.fullmatch(path.name)
    if blob is None:
        part = part_name(path.name)
        is_named = path.suffix.lower() == ".gguf"
        return part.stem if part is not None else path.stem if is_named else path.name
    named = read_gguf_header(path).metadata.get("general.name")
    title = _OTHER.sub("-", named.lower()).strip("-") if isinstance(named, str) else ""
    return f"{title or 'model'}-{blob['digest'][:_DIGEST_CHARS]}"


def folder_advice(folder: Path) -> tuple[str, str] | None:
    """Return what a folder without ``config.json`` holds and the command that pulls a model of it, if it has any."""
    if files := sorted(path for path in _files(folder) if path.suffix.lower() == ".gguf"):
        return "it is a folder of GGUF files; a pull takes one model", f"edgepipe models pull {files[0]}"
    blobs = [path for path in chain(_files(folder), _files(folder / "blobs")) if _is_model(path)]
    if not blobs:
        return None
    blobs.sort(key=lambda path: -path.stat().st_size)
    shown = ", ".join(f"{path.name[:19]} ({gguf_title(path)}, {_size(path)})" for path in blobs[:_SHOWN])
    more = f" and {len(blobs) - _SHOWN} more" if len(blobs) > _SHOWN else ""
    return f"it is a folder of Ollama's files; a pull takes one: {shown}{more}", f"edgepipe models pull {blobs[0]}"


def _files(folder: Path) -> Iterator[Path]:
    found = folder.iterdir() if folder.is_dir() else iter(())
    return (path for path in islice(found, _MAX_FILES) if path.is_file())


def _is_model(path: Path) -> bool:
    """Return whether a blob is a model: Ollama keeps templates, licences and projectors beside it."""
    if _BLOB.fullmatch(path.name) is None or not is_gguf(path):
        return False
    try:
        return read_gguf_header(path).metadata.get("general.architecture", "") not in _NO_MODELS
    except ModelInvalid:
        return False


def _size(path: Path) -> str:
    return format_bytes(path.stat().st_size)
