"""GGUF models that are split into several files, as ``llama-gguf-split`` writes them.

File names are ``NAME-00001-of-00003.gguf`` and so on. Each file has its own header with ``split.no`` (from 0),
``split.count`` and ``split.tensors.count`` (of all files). Only the first file has the model's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.weights.gguf_header import GgufHeader

GGUF_FILE = "model.gguf"
"""Name of a GGUF file within the store. The parts of a split model are ``model-00001-of-00003.gguf`` and so on."""

MAX_PARTS = 1000  # real models have below 50
_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})(?P<of>-of-)(?P<count>\d{5})(?P<suffix>\.gguf)", re.DOTALL | re.IGNORECASE
)
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_SAME = ("general.architecture", "general.name")  # equal in all parts that have them


@dataclass(frozen=True, slots=True, kw_only=True)
class PartName:
    """A part's file name, taken apart."""

    stem: str
    number: int  # number of the part, from 1
    count: int
    of: str = "-of-"  # word between the numbers: some systems give names in capitals
    suffix: str = ".gguf"

    def file_name(self, number: int) -> str:
        """Return the file name of another part of the same model."""
        return f"{self.stem}-{number:05d}{self.of}{self.count:05d}{self.suffix}"

    @property
    def all_names(self) -> tuple[str, ...]:
        """File names of all parts, in order."""
        return tuple(self.file_name(number) for number in range(1, self.count + 1))


def part_name(file_name: str) -> PartName | None:
    """Parse the file name of a part. Returns None for any other name, also one with impossible numbers."""
    match = _PART.fullmatch(file_name)
    if match is None:
        return None
    found = PartName(
        stem=match["stem"],
        number=int(match["number"]),
        count=int(match["count"]),
        of=match["of"],
        suffix=match["suffix"],
    )
    return found if 1 <= found.number <= found.count <= MAX_PARTS else None


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return the files of the model to which a GGUF file belongs, in order. Raises ModelInvalid if one is missing."""
    part = part_name(path.name)
    if part is None:
        return (path,)
    paths = tuple(path.with_name(name) for name in part.all_names)
    missing = [found.name for found in paths if not found.is_file()]
    if missing:
        raise ModelInvalid(
            f"'{missing[0]}' is missing",
            fact=f"the model is split into {part.count} files, {len(missing)} of them are not in the folder",
            next_step="put all parts into one folder",
        )
    return paths


def names_in_store(file_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names within the store of a model's GGUF files, given in order."""
    if len(file_names) == 1:
        return (GGUF_FILE,)
    return PartName(stem=Path(GGUF_FILE).stem, number=1, count=len(file_names)).all_names


def stored_gguf(names: Iterable[str]) -> tuple[str, ...]:
    """Return the GGUF files of a stored model among the names of its files, in order; empty for other formats."""
    present = set(names)
    if GGUF_FILE in present:
        return (GGUF_FILE,)
    prefix = f"{Path(GGUF_FILE).stem}-"
    return tuple(sorted(name for name in present if name.startswith(prefix) and _PART.fullmatch(name)))


def gguf_in(folder: Path) -> Path | None:
    """Return the first GGUF file of a model's folder in the store; None for other formats."""
    names = stored_gguf(path.name for path in folder.glob("*.gguf"))
    return folder / names[0] if names else None


def check_parts(headers: Mapping[str, GgufHeader]) -> None:
    """Check that headers by file name, in order, are all parts of one model. Raises ModelInvalid."""
    first_name, first = next(iter(headers.items()))
    count = len(headers)
    for index, (name, header) in enumerate(headers.items()):
        _check_numbers(name, header, index=index, count=count)
        for key in _SAME:
            if key in header.metadata and _text(header, key) != _text(first, key):
                raise _other_model(name, first_name, f"'{key}' differs")
        if _integer(header, _TENSORS) != _integer(first, _TENSORS):
            raise _other_model(name, first_name, f"'{_TENSORS}' differs")
    _check_tensors(headers, _integer(first, _TENSORS) if count > 1 else None)


def _check_numbers(name: str, header: GgufHeader, *, index: int, count: int) -> None:
    """Check a header's numbers against the file's name; a model in one file may have none."""
    number, given = _integer(header, _NO), _integer(header, _COUNT)
    alone = count == 1 and given in (None, 0, 1)
    if alone or (number, given) == (index, count):
        return
    if part_name(name) is None:
        raise ModelInvalid(
            f"'{name}' is one part of a model that is split into {given} files",
            fact="its name does not say which part",
            next_step="give the parts their names again: NAME-00001-of-00003.gguf, ...",
        )
    says = "no numbers" if number is None or given is None else f"part {number + 1} of {given}"
    raise ModelInvalid(
        f"'{name}' contradicts its name",
        fact=f"its header says {says}",
        next_step="fetch all parts of the model again",
    )


def _integer(header: GgufHeader, key: str) -> int | None:
    value = header.metadata.get(key)
    return value if type(value) is int else None


def _text(header: GgufHeader, key: str) -> str:
    value = header.metadata.get(key)
    return value if isinstance(value, str) else ""


def _check_tensors(headers: Mapping[str, GgufHeader], promised: int | None) -> None:
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor in holders:
                raise ModelInvalid(
                    f"'{file}' and '{holders[tensor]}' are not parts of one model",
                    fact=f"both have tensor '{tensor[:80]}'",
                )
            holders[tensor] = file
    if promised is not None and promised != len(holders):
        raise ModelInvalid(
            f"'{next(iter(headers))}' and its other parts are not one model",
            fact=f"they have {len(holders)} tensors, '{_TENSORS}' is {promised}",
        )


def _other_model(name: str, first: str, fact: str) -> ModelInvalid:
    return ModelInvalid(
        f"'{name}' belongs to another model than '{first}'", fact=fact, next_step="fetch all parts of the model again"
    )
