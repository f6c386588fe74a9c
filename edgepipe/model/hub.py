"""Models from the Hugging Face Hub: list files and sizes, fetch resumably, check each file against its hash.

``huggingface_hub`` is imported only when a pull begins. Its partial files stay in the folder, so that the next pull
continues where this one stopped.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from edgepipe.errors import EdgepipeError, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.model.config import read_hf_config
from edgepipe.model.install import METADATA_NAMES, check_metadata_size, file_chunks, hash_file
from edgepipe.model.progress import OnProgress, PlannedFile, ProgressCounter
from edgepipe.model.safe_path import check_member_name
from edgepipe.model.safetensors_file import INDEX_FILE, SINGLE_FILE, shard_names
from edgepipe.model.weights import GGUF_FILE

SHARDS = "model-*-of-*.safetensors"
CONTACT_TIMEOUT_S = 10.0  # for the hub's first answer

_SOURCE = re.compile(
    r"(?:hf:|https://huggingface\.co/)?(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?::(?P<pick>[\w.-]{1,80}))?(?:@(?P<revision>[\w./-]{1,80}))?",
    re.ASCII,
)
_PINNED = re.compile(
    r"hub:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})@(?P<commit>[0-9a-f]{40})", re.ASCII
)
_SPLIT_GGUF = re.compile(r".*-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """``org/name``, optionally ``:PICK`` (part of a GGUF file's name) and ``@REVISION``."""

    repo: str
    pick: str = ""
    revision: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlan:
    """Files that a pull fetches, at one commit."""

    source: HubSource
    commit: str
    files: tuple[PlannedFile, ...]


def parse_hub_source(text: str) -> HubSource | None:
    """Parse a hub source. Returns None for any other text."""
    match = _SOURCE.fullmatch(text)
    if match is None:
        return None
    return HubSource(repo=match["repo"], pick=match["pick"] or "", revision=match["revision"] or "main")


def pinned_text(repo: str, commit: str) -> str:
    """Return a manifest's text for a pulled model's source."""
    return f"hub:{repo}@{commit}"


def parse_pinned(text: str) -> HubSource | None:
    """Parse the output of ``pinned_text``, with the commit as revision. Returns None for any other text."""
    match = _PINNED.fullmatch(text)
    return HubSource(repo=match["repo"], revision=match["commit"]) if match and ".." not in text else None


def plan_hub(source: HubSource, *, endpoint: str | None = None) -> HubPlan:
    """List the model's files on the hub. Raises ModelUnknown, ModelDownloadFailed, ModelInvalid."""
    commit, files = list_hub(source, endpoint=endpoint)
    chosen = _choose(source, files)
    for file in chosen:
        check_metadata_size(file.name, file.num_bytes)
    return HubPlan(source=source, commit=commit, files=chosen)


def list_hub(source: HubSource, *, endpoint: str | None = None) -> tuple[str, list[PlannedFile]]:
    """Return the commit and the top folder's files. Raises ModelUnknown, ModelDownloadFailed, ModelInvalid."""
    from huggingface_hub import HfApi

    with hub_errors(source):
        api = HfApi(endpoint=endpoint)
        info = api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=CONTACT_TIMEOUT_S)
    listed = [_planned(file) for file in info.siblings or ()]
    return str(info.sha), [file for file in listed if file]


def fetch_hub(plan: HubPlan, folder: Path, on_progress: OnProgress, *, endpoint: str | None = None) -> None:
    """Fetch a plan's files into ``folder``, metadata first, so that an unusable model is refused before its weights.

    Raises ModelDownloadFailed (partial files stay), ModelInvalid (a file with a wrong hash is deleted).
    """
    total = sum(file.num_bytes for file in plan.files)
    counter = ProgressCounter(on_progress, "download", total)
    metadata = [file for file in plan.files if file.name in METADATA_NAMES]
    weights = [file for file in plan.files if file.name not in METADATA_NAMES]
    for file in metadata:
        _fetch(plan, file, folder, counter, endpoint)
    if not any(file.name.endswith(".gguf") for file in weights):
        read_hf_config(folder)
        if (folder / INDEX_FILE).exists():
            _check_index(folder, weights)
    for file in weights:
        _fetch(plan, file, folder, counter, endpoint)
        if file.name.endswith(".gguf"):
            (folder / file.name).replace(folder / GGUF_FILE)


def _planned(file: Any) -> PlannedFile | None:
    """Return a file of the repository's top with its size and hash, or None for others."""
    name = str(file.rfilename)
    if "/" in name or file.size is None:
        return None
    sha256 = str(file.lfs.sha256) if file.lfs else ""
    return PlannedFile(
        name=check_member_name(name, where="the hub"),
        num_bytes=int(file.size),
        sha256=sha256,
        git_sha1="" if sha256 else str(file.blob_id or ""),
    )


def _choose(source: HubSource, files: Sequence[PlannedFile]) -> tuple[PlannedFile, ...]:
    """Choose metadata and one set of weights: safetensors if present, else one GGUF file."""
    by_name = {file.name: file for file in files}
    metadata = [by_name[name] for name in METADATA_NAMES if name in by_name]
    gguf = [file for file in files if file.name.endswith(".gguf")]
    if INDEX_FILE in by_name and not source.pick:
        return (*metadata, *(file for file in files if fnmatch.fnmatchcase(file.name, SHARDS)))
    if SINGLE_FILE in by_name and not source.pick:
        return (*metadata, by_name[SINGLE_FILE])
    return (_one_gguf(source, gguf),)


def _one_gguf(source: HubSource, files: Sequence[PlannedFile]) -> PlannedFile:
    matching = [file for file in files if source.pick.lower() in file.name.lower()]
    if len(matching) == 1 and not _SPLIT_GGUF.fullmatch(matching[0].name):
        return matching[0]
    names = ", ".join(file.name for file in files[:12])
    if not matching:
        fact = f"GGUF files: {names}" if files else "it has neither model.safetensors nor a GGUF file"
        raise ModelInvalid(f"'{source.repo}' has no usable weights", fact=fact)
    raise ModelInvalid(
        f"'{source.repo}' has several GGUF files (or one split into parts)",
        fact=names,
        next_step=f"name one by a part of its name: edgepipe models pull {source.repo}:Q4_K_M",
    )


def _check_index(folder: Path, weights: Sequence[PlannedFile]) -> None:
    missing = set(shard_names(folder)) - {file.name for file in weights}
    if missing:
        raise ModelInvalid("the repository lacks weight files", fact=f"missing: {', '.join(sorted(missing)[:5])}")


def _fetch(plan: HubPlan, file: PlannedFile, folder: Path, counter: ProgressCounter, endpoint: str | None) -> None:
    path = folder / file.name
    stored = folder / GGUF_FILE if file.name.endswith(".gguf") else path
    if stored.is_file() and stored.stat().st_size == file.num_bytes and _hash_fits(file, stored):
        counter.add(file.name, file.num_bytes)  # an earlier pull has fetched it
        return
    import huggingface_hub

    download = cast("Any", huggingface_hub).hf_hub_download  # its overloads leave types open
    counted = _Counted(counter, file)
    with hub_errors(plan.source):
        download(
            plan.source.repo,
            file.name,
            revision=plan.commit,
            local_dir=folder,
            etag_timeout=CONTACT_TIMEOUT_S,
            endpoint=endpoint,
            tqdm_class=counted.bar_class(),
        )
    _verify(file, path)
    counted.finish()


def _verify(file: PlannedFile, path: Path) -> None:
    size = path.stat().st_size
    if size == file.num_bytes and not path.is_symlink() and _hash_fits(file, path):
        return
    path.unlink(missing_ok=True)
    raise ModelInvalid(
        f"'{file.name}' arrived damaged and was deleted",
        fact=f"{size} bytes arrived, {file.num_bytes} and another hash were announced",
        next_step="pull again; if it happens again, do not trust this source",
    )


def _hash_fits(file: PlannedFile, path: Path) -> bool:
    if file.sha256:
        return hash_file(path) == file.sha256
    if file.git_sha1:
        digest = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)  # git's blob id
        for chunk in file_chunks(path):
            digest.update(chunk)
        return digest.hexdigest() == file.git_sha1
    return True


class _Counted:
    """Forwards the library's progress bar to the counter; never reports more bytes than the file has."""

    def __init__(self, counter: ProgressCounter, file: PlannedFile) -> None:
        self._counter = counter
        self._file = file
        self._left = file.num_bytes

    def add(self, num_bytes: float) -> None:
        step = max(0, min(int(num_bytes), self._left))
        self._left -= step
        if step:
            self._counter.add(self._file.name, step)

    def finish(self) -> None:
        self.add(self._left)

    def bar_class(self) -> Any:
        from tqdm import tqdm

        report = self.add

        class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument]: takes none while running
            """Progress bar that only counts: draws nothing and starts no monitor thread."""

            monitor_interval = 0

            def display(self, *args: Any, **kwargs: Any) -> None:
                """Draw nothing."""

            def update(self, n: float | None = 1) -> bool | None:
                report(n or 0)
                return super().update(n)

        return Bar


@contextmanager
def hub_errors(source: HubSource) -> Generator[None]:
    """Translate the library's errors; the only place that does. Raises ModelUnknown, ModelDownloadFailed."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as exc:
        raise ModelDownloadFailed(
            f"'{source.repo}' is restricted to people with its owner's permission",
            fact="the hub refused (gated repository)",
            next_step="ask for access on the hub's page of the model, then: hf auth login",
        ) from exc
    except LocalEntryNotFoundError as exc:  # the library's error for: not cached, and the hub is unreachable
        raise _unreachable(source, exc.__cause__ or exc) from exc
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError, HFValidationError) as exc:
        raise ModelUnknown(
            f"the hub has no model '{source.repo}' (revision {source.revision})",
            fact=_first_line(exc),
            next_step="check the spelling; private models need: hf auth login",
        ) from exc
    except EdgepipeError:
        raise
    except OfflineModeIsEnabled as exc:
        raise ModelDownloadFailed(
            f"'{source.repo}' was not requested from the hub",
            fact="HF_HUB_OFFLINE is set on this machine",
            next_step="unset HF_HUB_OFFLINE and start again, or pull a local folder",
        ) from exc
    except (HfHubHTTPError, OSError, ConnectionError, TimeoutError) as exc:
        raise _unreachable(source, exc) from exc
    except Exception as exc:
        if type(exc).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "hf_xet", "huggingface_hub"):
            raise
        raise _unreachable(source, exc) from exc


def _unreachable(source: HubSource, exc: BaseException) -> ModelDownloadFailed:
    return ModelDownloadFailed(
        f"'{source.repo}' could not be fetched from the hub",
        fact=_first_line(exc),
        next_step="check the network and pull again (the pull resumes), or pull a local folder",
    )


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0][:200]
