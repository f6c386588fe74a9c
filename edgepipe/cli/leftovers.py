"""What edgepipe keeps on this machine: which files it made, and which lie beside them and are the user's.

``--data-dir`` and ``--models-dir`` may name any folder, also one with a user's own files. So nothing is edgepipe's
because of where it lies: in a data directory only names that a node or the command line writes count, and only where
a node once made its identity; in a folder of models only folders with a model's card and manifest count, and in those
only what the manifest lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.store.adoption import ADOPTED_FOR_FILE, is_model_folder
from edgepipe.store.linked_files import LINKS_FILE
from edgepipe.text.conversations.known_traits import TRAITS_FILE
from edgepipe.weights.manifest import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, read_manifest
from edgepipe.weights.repacked import REPACKED_FOLDER
from edgepipe.weights.tensor_folder import TENSOR_FOLDER

_DATA = re.compile(
    r"(identity|trust|chats|batches"
    r"|(audit\.log|node\.log)(\.\d+)?|start\.log|open\.html|service\.err|chat_history|daemon\.(lock|sock)"
    r"|(incarnation|addresses\.json|layers\.json|keep_alive\.json|served\.bin|api-key)(\.part)?)"
)
_UNFINISHED = re.compile(r"\.(pulling|quantising|adopting|removing)-.+")
_IN_EVERY_MODEL = frozenset(
    {
        CARD_FILE,
        MANIFEST_FILE,
        TOKENIZER_FILE,
        LINKS_FILE,
        ADOPTED_FOR_FILE,
        TENSOR_FOLDER,
        REPACKED_FOLDER,
        TRAITS_FILE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Files or folders of one kind that edgepipe made in one place."""

    place: Path
    """What people read: the file itself, or the folder that has the paths."""
    paths: tuple[Path, ...]
    """What is removed, each whole. ``place`` itself goes when nothing else is left in it."""
    what: str
    stays: str = ""  # why it is not removed; empty: it is

    @property
    def num_bytes(self) -> int:
        """Size of all paths, in bytes."""
        return sum(_size(path) for path in self.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """Everything that edgepipe made, and what lies among it that edgepipe did not make."""

    leftovers: tuple[Leftover, ...]
    foreign: tuple[Path, ...]


def file_leftover(path: Path, what: str, *, stays: str = "") -> list[Leftover]:
    """Return one file or folder that is edgepipe's as a whole; nothing if it is missing."""
    return [Leftover(place=path, paths=(path,), what=what, stays=stays)] if path.exists() else []


def data_leftovers(data_dir: Path, *, others: Sequence[Path]) -> FoundFiles:
    """Find what a node and the command line wrote in a data directory.

    ``others``: paths that may lie in it and are listed for themselves (models, settings).
    """
    if not data_dir.is_dir():
        return FoundFiles(leftovers=(), foreign=())
    entries = [
        entry for entry in sorted(data_dir.iterdir()) if not any(other.is_relative_to(entry) for other in others)
    ]
    made = _was_a_node(data_dir)
    own = tuple(entry for entry in entries if made and _DATA.fullmatch(entry.name))
    leftover = Leftover(place=data_dir, paths=own, what="identity, trust, logs, conversations, batches")
    return FoundFiles(
        leftovers=(leftover,) if own else (), foreign=tuple(entry for entry in entries if entry not in own)
    )


def _was_a_node(data_dir: Path) -> bool:
    """Return whether edgepipe used this folder: a node makes its key first, and a chat its folder of conversations."""
    return (data_dir / "identity" / "key.pem").is_file() or (data_dir / "chat_history").is_file()


def model_leftovers(models_dir: Path, *, purge: bool, stays: str) -> FoundFiles:
    """Find models and what backends stored beside them. Without ``purge`` only the latter is removed.

    ``stays``: why models stay.
    """
    if not models_dir.is_dir():
        return FoundFiles(leftovers=(), foreign=())
    found: list[Leftover] = []
    foreign: list[Path] = []
    models: list[Path] = []
    for entry in sorted(models_dir.iterdir()):
        if entry.is_symlink() or not entry.is_dir():
            foreign.append(entry)
        elif _UNFINISHED.fullmatch(entry.name):
            found.append(Leftover(place=entry, paths=(entry,), what="an unfinished download"))
        elif is_model_folder(entry):
            own, others = _split_model(entry)
            repacked = entry / REPACKED_FOLDER
            if not purge and repacked in own:
                found.append(Leftover(place=repacked, paths=(repacked,), what="weights in this CPU's layout"))
                own.remove(repacked)
            models += own
            foreign += others
        else:
            foreign.append(entry)
    if models:
        why = "" if purge else stays
        found.append(Leftover(place=models_dir, paths=tuple(models), what="models", stays=why))
    return FoundFiles(leftovers=tuple(found), foreign=tuple(foreign))


def _split_model(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the entries of a model's folder that edgepipe made, and the others."""
    try:
        named = {Path(entry.name).parts[0] for entry in read_manifest(folder).files}
    except ModelInvalid:
        named = set[str]()  # damaged: what cannot be proven to be edgepipe's stays
    own: list[Path] = []
    others: list[Path] = []
    for entry in sorted(folder.iterdir()):
        (own if entry.name in _IN_EVERY_MODEL | named else others).append(entry)
    return own, others


def emptied_folders(paths: Sequence[Path], *, up_to: Path) -> Iterator[Path]:
    """Yield the folders of removed paths, innermost first, up to and with ``up_to``: each goes if it is empty now."""
    parents = {parent for path in paths for parent in path.parents if parent.is_relative_to(up_to)}
    yield from sorted(parents, key=lambda parent: len(parent.parts), reverse=True)


def _size(path: Path) -> int:
    """Return the bytes of a file or of all readable files below a folder."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if path.exists() or path.is_symlink() else 0
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
