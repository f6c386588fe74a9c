"""Files of a stored model that have another name outside of the store, where the user's tools may write them in place.

The folder keeps a stamp of each: size, times of the last change, inode. A file with the same stamp is unchanged. Any
other is compared with the manifest before its bytes are used: it may have been touched, linked or unlinked only, and
then it gets a new stamp.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.files.progress import OnProgress, PullProgress
from edgepipe.files.strict_json import parse_json_object
from edgepipe.plain_words import plain
from edgepipe.store.install import file_chunks
from edgepipe.weights.manifest import MANIFEST_FILE, read_manifest
from edgepipe.weights.repacked import REPACKED_FOLDER
from edgepipe.weights.tensor_folder import TENSOR_FOLDER

logger = logging.getLogger(__name__)

LINKS_FILE = "links.json"

_WHAT = f"'{LINKS_FILE}'"
_MOST_BYTES = 4 << 20  # a stamp takes about 150 bytes

OnBytes = Callable[[int, int], None]
"""Called with the bytes that were compared so far, and all bytes to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What changes with a file's content; the second time also with its names and rights."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Return a file's stamp. Raises OSError."""
        info = path.stat()
        return cls(num_bytes=info.st_size, mtime_ns=info.st_mtime_ns, ctime_ns=info.st_ctime_ns, inode=info.st_ino)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    """A folder's record."""

    pulled_from: str = ""  # path of the user's file or folder; empty: not known
    stamps: Mapping[str, Stamp] = field(default_factory=dict[str, Stamp])  # stamp of each file by its name in the store


def write_links(folder: Path, links: LinkRecord) -> None:
    """Write a folder's record. Raises OSError."""
    value = {"pulled_from": links.pulled_from, "files": {name: asdict(stamp) for name, stamp in links.stamps.items()}}
    fresh = folder / f".{LINKS_FILE}-{secrets.token_hex(4)}"
    try:
        fresh.write_text(json.dumps(value), encoding="utf-8")
        fresh.replace(folder / LINKS_FILE)
    finally:
        fresh.unlink(missing_ok=True)


def read_links(folder: Path) -> LinkRecord:
    """Read a folder's record; an empty one if it is missing or damaged: then the manifest decides."""
    try:
        with (folder / LINKS_FILE).open("rb") as file:
            data = file.read(_MOST_BYTES)
        fields = Fields(parse_json_object(data, what=_WHAT), what=_WHAT)
        stamps = {name: _stamp(value) for name, value in _object(fields.raw("files")).items()}
        return LinkRecord(pulled_from=fields.text("pulled_from", default=""), stamps=stamps)
    except (FileNotFoundError, NotADirectoryError):
        return LinkRecord()
    except (OSError, ModelInvalid) as exc:
        logger.info("the record of linked files is not used: %s", exc)
        return LinkRecord()


def touched_files(folder: Path) -> dict[str, Stamp]:
    """Return the files that others can name and that lack their stamp, with the stamps that they have now.

    Files without another name are the store's own. Raises ModelInvalid if a file cannot be read.
    """
    if (folder / TENSOR_FOLDER).is_dir():
        return {}  # filled tensor by tensor
    stamps = read_links(folder).stamps
    found: dict[str, Stamp] = {}
    try:
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            if name in stamps or path.stat().st_nlink > 1:
                now = Stamp.of(path)
                if now != stamps.get(name):
                    found[name] = now
    except OSError as exc:
        raise ModelInvalid(f"the files of '{folder.name}' cannot be read", fact=plain(exc)) from exc
    return found


def check_unchanged(folder: Path, on_bytes: OnBytes = lambda _done, _total: None) -> None:
    """Check that a stored model's files are those of its manifest. Reads nothing but their stamps unless they differ.

    Raises ModelInvalid.
    """
    touched = touched_files(folder)
    if not touched:
        return
    promised = {file.name: file.sha256 for file in read_manifest(folder).files}
    done, total = 0, sum(stamp.num_bytes for name, stamp in touched.items() if name in promised)
    for name in touched.keys() & promised.keys():
        logger.info("comparing '%s' with the manifest: it was touched since it was pulled", name)
        digest = hashlib.sha256()
        for chunk in file_chunks(folder / name):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done, total)
        if digest.hexdigest() != promised[name]:
            raise changed(folder, name)
    if not touched.items() <= _now(folder, touched).items():
        raise changed(folder, next(iter(touched)))
    links = read_links(folder)
    with contextlib.suppress(OSError):  # a disk may be read-only: then every load compares the files
        write_links(folder, LinkRecord(pulled_from=links.pulled_from, stamps={**links.stamps, **touched}))


def counted(on_progress: OnProgress) -> OnBytes:
    """Report what is compared as progress of a pull."""

    def tell(done: int, total: int) -> None:
        on_progress(PullProgress(phase="check", file="", done_bytes=done, total_bytes=total))

    return tell


def check_stamps(folder: Path) -> None:
    """Check that linked files have the stamps that the record has, without comparing their content.

    Raises ModelInvalid.
    """
    stamps = read_links(folder).stamps
    for name, now in _now(folder, stamps).items():
        if now != stamps[name]:
            raise changed(folder, name)


def changed(folder: Path, name: str) -> ModelInvalid:
    """Return the error for a file that is no longer what was pulled."""
    source = read_links(folder).pulled_from
    again = f"edgepipe models pull {shlex.quote(source) if source else 'FOLDER'}"
    return ModelInvalid(
        f"'{name}' changed since it was pulled",
        fact=f"it shares its bytes with the file it was pulled from, in {source or 'another folder'}",
        next_step=f"pull it again: {again}",
    )


def _now(folder: Path, names: Mapping[str, object]) -> dict[str, Stamp]:
    try:
        return {name: Stamp.of(folder / name) for name in names}
    except OSError as exc:
        raise ModelInvalid(f"the files of '{folder.name}' cannot be read", fact=plain(exc)) from exc


def _files(folder: Path) -> Iterator[Path]:
    """Yield a model's files, without those that its content does not depend on."""
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name != REPACKED_FOLDER]
        for name in names:
            if name not in (MANIFEST_FILE, LINKS_FILE):
                yield Path(parent) / name


def _object(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}


def _stamp(value: object) -> Stamp:
    fields = Fields(_object(value), what=_WHAT)

    def number(name: str) -> int:
        return fields.integer(name, low=-1 << 63, high=1 << 64)

    return Stamp(
        num_bytes=number("num_bytes"), mtime_ns=number("mtime_ns"), ctime_ns=number("ctime_ns"), inode=number("inode")
    )
