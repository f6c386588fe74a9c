"""Names of models as people type them: ``qwen3:8b``, ``Llama 3.3 70B``, ``hf.co/ORG/REPO:Q4_K_M``, a hub's URL. PURE.

Every command, the API and the setup read names here. ``understand`` says what a text means without asking the hub,
``meant_names`` chooses among the models that are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from urllib.parse import unquote

from edgepipe.errors import ModelUnknown
from edgepipe.spec.names import matching_names, plain_type
from edgepipe.store.known_models import DEMO, USUAL_TYPE, KnownModel, key_of, known_models, models_by_key

_MOST_CHARS = 400  # limit of a text's length; longer ones are no names
_SHOWN_CHARS = 120
_NEAREST = 3
_PUBLISHED_TYPE = "MXFP4"  # type of the models that gpt-oss's makers publish
_UNSERVED = ("gemma4e2b", "gemma4e4b")  # keys of names whose form ``families.gemma4`` refuses
_MOST_REMEMBERED = 1024  # names that were understood, so that a long list is read once

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_REPOSITORY = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?::(?P<type>[\w.-]{{1,80}}))?(?:@(?P<revision>[\w./-]{{1,80}}))?", re.ASCII
)
_HUB = re.compile(r"(?:hf:(?://)?|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)(?P<rest>.*)", re.I | re.S)
_OLLAMA = re.compile(r"(?:(?:https?://)?(?:www\.|registry\.)?ollama\.(?:com|ai)/)?library/(?P<rest>.*)", re.I | re.S)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
# Address of a repository's file or folder.
_PAGE = re.compile(
    rf"(?P<repo>{_PART}/{_PART})/(?:blob|resolve|raw|tree)/(?P<revision>[^/]{{1,80}})(?:/(?P<path>.+))?", re.ASCII
)
_LATEST = re.compile(r":latest\s*$", re.I)
_TYPE = (
    r"(?:(?:ud|i1)-)?(?:i?q\d{1,2}(?:[-_](?:\d|k|[sml]|x{1,3}[sl]|nl))*|tq\d_\d|bf16|fp?16|fp?32|mxfp4(?:[-_]moe)?|fp8)"
    r"|\d{1,2}-?bit"
)
_SHORT = re.compile(rf"(?P<base>.+?)(?:[:\s_-]+(?P<type>{_TYPE}))?", re.I | re.S)
_LOOSE_TYPES = {  # types that name bits only
    "4bit": USUAL_TYPE,
    "8bit": "Q8_0",
    "q3": "Q3_K_M",
    "q4": USUAL_TYPE,
    "q5": "Q5_K_M",
    "q6": "Q6_K",
    "q8": "Q8_0",
    "16bit": "BF16",
    "fp16": "F16",
    "fp32": "F32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """What a person means by a name."""

    repository: str  # ORG/NAME on the hub; DEMO: the demo model
    type: str = ""  # type of the GGUF file to fetch; empty: the repository's only one, or a question
    revision: str = "main"
    file: str = ""  # path of a file in the repository, from its URL
    known: KnownModel | None = None  # its entry in the table
    type_given: bool = False  # the person has named the type

    @property
    def source(self) -> str:
        """The text for ``models pull`` that means the same."""
        kind = f":{self.type}" if self.type and self.repository != DEMO else ""
        return f"{self.repository}{kind}" + (f"@{self.revision}" if self.revision != "main" else "")

    @property
    def planned(self) -> str:
        """Shape and type to plan with: ``qwen3-8b:q4_k_m``; empty if the shape is not known."""
        known = self.known
        return f"{known.name}:{(self.type or self._stored_type(known)).lower()}" if known is not None else ""

    def _stored_type(self, known: KnownModel) -> str:
        """Return the type of the repository's weights, as far as its name says: without a word, 16 bits."""
        if self.repository == known.repository:
            return known.type
        found = _SHORT.fullmatch(self.repository)
        kind = _canonical_type(found["type"] or "") if found is not None else ""
        packed = "gguf" in self.repository.lower() or known.type == _PUBLISHED_TYPE
        return kind or (known.type if packed else "BF16")


def understand(text: str) -> Meant:
    """Return what a name means. Raises ModelUnknown, which names the three nearest known models."""
    meant = _meant(text)
    if meant is None:
        raise unknown(text)
    return meant


@lru_cache(maxsize=_MOST_REMEMBERED)
def understood(text: str) -> Meant | None:
    """Return what a name means; None for any other text."""
    try:
        return _meant(text)
    except ModelUnknown:
        return None


def planned_name(text: str) -> str:
    """Return the shape and the type with which to plan a model: ``qwen3-8b:q4_k_m``. Raises ModelUnknown."""
    meant = _meant(text)
    if meant is None:
        raise unknown(text).changed(
            next_step=f"name one of them, such as {nearest(text)[0]}, or ORG/NAME of one of them on the hub"
        )
    if meant.planned:
        return meant.planned
    raise ModelUnknown(
        f"the shape of '{meant.source[:_SHOWN_CHARS]}' is not known before it is fetched",
        fact=f"nearest known names: {', '.join(nearest(text))}",
        next_step=f"name one of them, or fetch it first: edgepipe models pull {meant.source[:_SHOWN_CHARS]}",
    )


def unknown(text: str) -> ModelUnknown:
    """Return the error for a text that is no model's name."""
    near = nearest(text)
    return ModelUnknown(
        f"no model is called '{text.strip()[:_SHOWN_CHARS]}'",
        fact=f"nearest known names: {', '.join(near)}",
        next_step=f"edgepipe models pull {near[0]}    (or another of these, or ORG/NAME of the Hugging Face Hub)",
    )


def nearest(text: str) -> list[str]:
    """Return the names of the three known models that are nearest to a text, best first."""
    found = _SHORT.fullmatch(_without_latest(text[:_MOST_CHARS]).rpartition("/")[2] or text[:1])
    key = key_of(found["base"]) if found is not None else ""

    def likeness(model: KnownModel) -> float:
        matcher = SequenceMatcher(b=key)
        scores: list[float] = []
        for name in (model.name, *model.also):
            matcher.set_seq1(key_of(name))
            scores.append(matcher.ratio())
        return max(scores)

    return [model.name for model in sorted(known_models(), key=likeness, reverse=True)[:_NEAREST]]


def meant_names(typed: str, there: Iterable[str]) -> list[str]:
    """Return the names of ``there`` that a person means by ``typed``, in order; several if the text leaves it open.

    ``there`` are models of a store or a cluster. A name of its own comes first, then ``matching_names`` without
    ":latest", then what ``understand`` says: a known model in any repository, first in the table's and in its type.
    """
    names = sorted(set(there))
    for text in dict.fromkeys((typed, _without_latest(typed))):
        if found := matching_names(text, names):
            return found
    meant = understood(typed)
    if meant is None:
        return []
    if meant.known is None or not _is_short(typed):
        return matching_names(meant.source.partition("@")[0], names)
    own = matching_names(meant.source, names)
    return own or [name for name in names if _is_of(name, meant)]


def _is_of(name: str, meant: Meant) -> bool:
    """Return whether a model that is there is the known one that a person means, in the type that they named."""
    found = understood(name)
    if found is None or found.known is not meant.known:
        return False
    return not meant.type_given or plain_type(found.planned.partition(":")[2]) == plain_type(meant.type)


def _meant(text: str) -> Meant | None:
    text = text.strip()
    if not text or len(text) > _MOST_CHARS:
        return None
    if (found := _OLLAMA.fullmatch(text)) is not None:
        return _of_table(found["rest"])
    if (found := _HUB.fullmatch(text)) is not None:
        return _of_hub(found["rest"])
    if _ADDRESS.match(text):
        raise ModelUnknown(
            f"'{text[:_SHOWN_CHARS]}' is not on the Hugging Face Hub",
            fact="edgepipe fetches from huggingface.co only",
            next_step="download the file, then: edgepipe models pull FILE.gguf",
        )
    return _of_repository(text) if "/" in text else _of_table(text)


def _of_hub(path: str) -> Meant | None:
    """Return what the part of a URL after the hub's name means."""
    path = unquote(re.split(r"[?#]", path)[0]).strip("/")
    kind = path.partition("/")[0].lower()
    if kind in ("datasets", "spaces", "collections", "papers"):
        raise ModelUnknown(
            f"'{path[:_SHOWN_CHARS]}' is no model",
            fact=f"the address begins with '{kind}/'",
            next_step="open the model's page and copy its address: https://huggingface.co/ORG/NAME",
        )
    page = _PAGE.fullmatch(path)
    if page is None:
        return _of_repository(path)
    meant = _of_repository(f"{page['repo']}@{page['revision']}")
    inner = page["path"] or ""
    if meant is None or not inner:
        return meant
    return _in_folder(meant, inner) if "." not in inner.rpartition("/")[2] else _with_file(meant, inner)


def _with_file(meant: Meant, path: str) -> Meant:
    """Return the meaning of a file's page: a GGUF file is one type of the repository, any other file all of it."""
    from edgepipe.store.gguf_names import type_of

    if not path.lower().endswith(".gguf"):
        return meant
    return replace(meant, file=path, type=type_of(path), type_given=True)


def _in_folder(meant: Meant, folder: str) -> Meant:
    """Return the meaning of a folder's page: often it has the files of one type."""
    from edgepipe.store.gguf_names import type_of

    kind = type_of(f"{folder}/x.gguf")
    return replace(meant, type=kind, type_given=bool(kind))


def _of_repository(text: str) -> Meant | None:
    found = _REPOSITORY.fullmatch(_without_latest(text.removesuffix("/")))
    if found is None or "--" in found["repo"] or ".." in text:
        return None
    repo, kind = found["repo"], found["type"] or ""
    own = next((model for model in known_models() if model.repository.lower() == repo.lower()), None)
    return Meant(
        repository=own.repository if own is not None else repo,
        type=kind,
        revision=found["revision"] or "main",
        known=own or _known(repo.partition("/")[2]),
        type_given=bool(kind),
    )


def _known(name: str) -> KnownModel | None:
    """Return the known model of a name, which may end with a type."""
    by_key = models_by_key()
    if (known := by_key.get(key_of(name))) is not None:
        return known
    found = _SHORT.fullmatch(re.sub(r"(?i)[-_]gguf$", "", name))
    return by_key.get(key_of(found["base"])) if found is not None and found["type"] else None


def _of_table(text: str) -> Meant | None:
    """Return what a short name means; None if the table does not have it. Raises ModelUnknown for an unserved one."""
    found = _SHORT.fullmatch(_without_latest(text))
    if found is not None and key_of(found["base"]) in _UNSERVED:
        raise ModelUnknown(
            f"edgepipe does not serve '{text.strip()[:_SHOWN_CHARS]}'",
            fact="Gemma 4 E2B and E4B have per-layer embeddings, and layers that share their KV cache",
            next_step="edgepipe models pull gemma-3-4b    (or gemma-4-26b-a4b)",
        )
    known = models_by_key().get(key_of(found["base"])) if found is not None else None
    if found is None or known is None:
        return None
    kind = _canonical_type(found["type"] or "")
    return Meant(repository=known.repository, type=kind or known.type, known=known, type_given=bool(kind))


def _canonical_type(text: str) -> str:
    """Return a type as it is in names of files: ``Q4_K_M`` for ``q4-k-m`` and for ``q4``."""
    prefix, kind = "", text.lower()
    for maker in ("ud-", "i1-"):
        if kind.startswith(maker):
            prefix, kind = maker, kind[len(maker) :]
    if kind.replace("-", "") in _LOOSE_TYPES:
        kind = _LOOSE_TYPES[kind.replace("-", "")]
    return (prefix + kind.replace("-", "_")).upper()


def _without_latest(text: str) -> str:
    return _LATEST.sub("", text.strip())


def _is_short(text: str) -> bool:
    return "/" not in text or _OLLAMA.fullmatch(text.strip()) is not None
