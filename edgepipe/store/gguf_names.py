"""GGUF files of a repository, by the type in their names: ``Llama-3.3-70B-Instruct-UD-Q4_K_XL-00001-of-00002.gguf``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from edgepipe.errors import ModelInvalid
from edgepipe.files.progress import PlannedFile
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.names import MAX_TYPE_CHARS, canonical_name, is_name, plain_type
from edgepipe.weights.gguf_split import PartName, part_name

_TYPE = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(?P<type>(?:(?:UD|I1)-)?"
    r"(?:I?Q\d{1,2}(?:_(?:\d{1,2}|[KSMLP]|X{1,3}[SL]|NL|K[SLT]{1,2}|R\d))*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))"
    r"(?![A-Za-z0-9_])",
    re.ASCII | re.IGNORECASE,
)
_NO_MODELS = re.compile(  # pictures, statistics, drafts for speculation, vocabularies; NAME-MTP-Q8_0 is a model
    r"(?i:mmproj|imatrix)|^(?:mtp|eagle3|dflash|dspark)-|^(?i:(?:ggml-)?vocab-)"
)
_SHOWN = 12
_MAIN_SCHEMES = {"IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_XXS", "IQ3_M": "IQ3_S", "MXFP4_MOE": "MXFP4", "Q8_K_XL": "Q8_0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufChoice:
    """One model of a repository: a GGUF file, or all parts of a split one, in order."""

    label: str  # its type if no other choice has it, else the file's name
    type: str  # type in capital letters; empty if the name has none
    files: tuple[PlannedFile, ...]
    missing: tuple[str, ...] = ()  # parts that the repository lacks

    @property
    def num_bytes(self) -> int:
        """Total bytes of the files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def known(self) -> bool:
        """Whether edgepipe knows the type, or the name has none and only the header says."""
        return not self.type or bool(main_scheme(self.type))

    @property
    def usable(self) -> bool:
        """Whether all its parts are there, and its type is known."""
        return self.known and not self.missing


def type_of(file_name: str) -> str:
    """Return the last whole type in a file's path, in capital letters: ``UD-Q4_K_XL``; empty without one."""
    path = PurePosixPath(file_name)
    part = part_name(path.name)
    stem = part.stem if part is not None else path.stem
    found = [match["type"] for match in _TYPE.finditer(stem)] or _TYPE.findall(path.parent.name)
    kind = found[-1].upper() if found else ""
    return {"FP16": "F16", "FP32": "F32"}.get(kind, kind)


def main_scheme(kind: str) -> str:
    """Return the GGUF type of most weights in a file of a type: Q4_K for UD-Q4_K_XL; empty if it is not known."""
    name = plain_type(kind).upper()
    name = _MAIN_SCHEMES.get(name, name)
    return next((known for known in (name, re.sub(r"_X*[SML]$", "", name)) if known in BLOCKS_BY_NAME), "")


def gguf_choices(files: Iterable[PlannedFile]) -> list[GgufChoice]:
    """Return the models among a repository's files, largest first, without projectors and importance matrices."""
    grouped: dict[tuple[str, int], dict[int, PlannedFile]] = {}
    for file in files:
        path = PurePosixPath(file.name)
        if path.suffix.lower() != ".gguf" or _NO_MODELS.search(path.name):
            continue
        part = part_name(path.name) or PartName(stem=path.stem, number=1, count=1)
        grouped.setdefault((str(path.with_name(part.stem)), part.count), {})[part.number] = file
    found: dict[tuple[str, str], GgufChoice] = {}
    for (stem, count), parts in sorted(grouped.items(), key=lambda group: -group[0][1]):
        choice = _choice(parts, count, stem=PurePosixPath(stem).name)
        found[choice.type, choice.label] = choice  # a whole copy replaces a split one
    types = [kind for kind, _ in found]
    labelled = [
        replace(one, label=one.type) if types.count(one.type) == 1 and one.type else one for one in found.values()
    ]
    usable = [choice for choice in labelled if is_name(canonical_name(f"name:{choice.label}"))]
    return sorted(usable, key=lambda choice: (-choice.num_bytes, choice.label))


def choose_type(pick: str, choices: Sequence[GgufChoice], *, repo: str) -> GgufChoice:
    """Return the choice with the type ``pick``, or the only one that has it with a prefix such as ``UD-``.

    Without ``pick``: the only choice. ``choices`` is not empty. Raises ModelInvalid.
    """
    wanted = {"fp16": "f16", "fp32": "f32"}.get(pick.lower(), pick.lower())
    exact = [choice for choice in choices if wanted and wanted in (choice.label.lower(), choice.type.lower())]
    found = exact or [choice for choice in choices if not wanted or plain_type(choice.type) == wanted]
    if len(found) == 1:
        return _complete(found[0], [choice for choice in choices if choice.usable], repo)
    labels = ", ".join(choice.label for choice in choices[:_SHOWN]) + ", ..." * (len(choices) > _SHOWN)
    step = f"edgepipe models pull {repo}:{recommended_label(found or choices)}"
    if not found:
        raise ModelInvalid(f"'{repo}' has no file of the type '{pick}'", fact=f"types: {labels}", next_step=step)
    raise ModelInvalid(f"'{repo}' has several GGUF files", fact=f"types: {labels}", next_step=step)


def stored_name(repo: str, choice: GgufChoice, *, alone: bool) -> str:
    """Return the name under which the store keeps a choice; ``alone``: the repository has no other one."""
    return repo if alone and not choice.type else canonical_name(f"{repo}:{choice.label}")


def recommended_label(choices: Sequence[GgufChoice]) -> str:
    """Return the label of Q4_K_M if there is one, else of a choice of middle size; if possible of a usable one."""
    choices = [choice for choice in choices if choice.usable] or choices
    preferred = next((choice for choice in choices if choice.type == "Q4_K_M"), None)
    preferred = preferred or next((choice for choice in choices if plain_type(choice.type).startswith("q4_k")), None)
    return (preferred or choices[len(choices) // 2]).label


def _choice(parts: dict[int, PlannedFile], count: int, *, stem: str) -> GgufChoice:
    files = tuple(parts[number] for number in sorted(parts))
    missing = [number for number in range(1, count + 1) if number not in parts]
    names = PartName(stem=stem, number=1, count=count)
    plain = re.sub(r"\.{2,}", ".", re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9._-]+", "-", stem))).strip("-._")
    return GgufChoice(
        label=plain[:MAX_TYPE_CHARS],
        type=type_of(files[0].name),
        files=files,
        missing=tuple(names.file_name(number) for number in missing),
    )


def _complete(choice: GgufChoice, usable: Sequence[GgufChoice], repo: str) -> GgufChoice:
    """Return a choice with all its parts. Raises ModelInvalid, which names one of ``usable`` instead."""
    if not choice.missing:
        return choice
    raise ModelInvalid(
        f"the repository lacks parts of '{choice.label}'",
        fact=f"missing: {', '.join(choice.missing[:5])}",
        next_step=f"edgepipe models pull {repo}:{recommended_label(usable)}" if usable else "",
    )
