"""Take a user's own files into the store: as clones or by another name where the disk can, else as copies.

Models have gigabytes, so a copy would double them on most disks. A name in common has a price: a tool that writes the
user's file in place changes the store's. ``linked_files.py`` finds that out before the bytes are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgepipe.files.cloning import clone, hard_link
from edgepipe.files.disk import check_room
from edgepipe.files.progress import OnProgress, ProgressCounter
from edgepipe.store.install import METADATA_NAMES
from edgepipe.store.linked_files import LinkRecord, Stamp, write_links

_COPY_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """Files to take."""

    model_id: str
    pulled_from: Path  # path that the user gave
    files: Sequence[tuple[Path, str]]  # each file and its name in the store

    def into(self, folder: Path, on_progress: OnProgress) -> None:
        """Take the files; record the names in common. Metadata is copied. Raises OSError, ModelDownloadFailed."""
        counter = ProgressCounter(on_progress, "copy", sum(path.stat().st_size for path, _ in self.files))
        linked: list[str] = []
        to_copy: list[tuple[Path, Path]] = []
        for path, name in self.files:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            if name in METADATA_NAMES or not (clone(path, place) or _linked(path, place, name, linked)):
                to_copy.append((path, place))
            else:
                counter.add(name, path.stat().st_size)
        check_room(self.model_id, folder, sum(path.stat().st_size for path, _ in to_copy))
        for path, place in to_copy:
            _copy(path, place, counter)
        if linked:
            stamps = {name: Stamp.of(folder / name) for name in linked}
            write_links(folder, LinkRecord(pulled_from=str(self.pulled_from.absolute()), stamps=stamps))


def _linked(path: Path, place: Path, name: str, linked: list[str]) -> bool:
    if not hard_link(path, place):
        return False
    linked.append(name)
    return True


def _copy(path: Path, place: Path, counter: ProgressCounter) -> None:
    part = place.with_name(f"{place.name}.part")
    with path.open("rb") as source, part.open("wb") as target:
        while chunk := source.read(_COPY_CHUNK_BYTES):
            target.write(chunk)
            counter.add(place.name, len(chunk))
    part.replace(place)
