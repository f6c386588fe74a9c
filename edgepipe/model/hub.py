"""Models from the Hugging Face Hub: list files and sizes, fetch resumably, check each file against its hash.

``huggingface_hub`` is imported only when a pull begins. Its partial files stay in the folder, so that the next pull
continues where this one stopped.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import io
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

from edgepipe.errors import ArchitectureUnsupported, EdgepipeError, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.model.disk import disk_errors
from edgepipe.model.gguf_names import GgufChoice, choose_type, gguf_choices, recommended_label, stored_name
from edgepipe.model.gguf_split import names_in_store
from edgepipe.model.install import METADATA_NAMES, check_metadata_size, file_chunks, hash_file
from edgepipe.model.manifest import TOKENIZER_FILE
from edgepipe.model.progress import OnProgress, PlannedFile, ProgressCounter
from edgepipe.model.safe_path import check_member_name
from edgepipe.model.safetensors_file import INDEX_FILE, SINGLE_FILE
from edgepipe.plain_words import plain

SHARDS = "model*-of-*.safetensors"  # also model.safetensors-00001-of-00004.safetensors, as of Qwen3.5
CONTACT_TIMEOUT_S = 10.0  # for the hub's first answer
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0  # before a file is asked for again, doubling
_PATIENCE_S = 600.0  # without a byte, once a pull has begun: a router starts anew, the hub's limits last five minutes
_STRANGE_TOKENIZERS = ("tekken.json", "tiktoken.model", "tokenizer.model")  # of Mistral, of Kimi, SentencePiece
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # PyTorch's own formats

_SOURCE = re.compile(
    r"(?:hf:|https://huggingface\.co/)?(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?::(?P<type>[\w.-]{1,80}))?(?:@(?P<revision>[\w./-]{1,80}))?",
    re.ASCII,
)
_QUANTISED = re.compile(r"base_model:quantized:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})", re.ASCII)
_PINNED = re.compile(
    r"hub:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})@(?P<commit>[0-9a-f]{40})", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """``org/name``, optionally ``:TYPE`` (of a GGUF file) and ``@REVISION``."""

    repo: str
    type: str = ""
    revision: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubListing:
    """A repository's files at one commit."""

    commit: str
    files: tuple[PlannedFile, ...]  # the top folder's, and all GGUF files
    original: str = ""  # the repository that this one quantises, as its makers say


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlan:
    """Files that a pull fetches, at one commit."""

    source: HubSource
    commit: str
    model_id: str
    files: tuple[PlannedFile, ...]
    gguf: tuple[PlannedFile, ...] = ()  # the weights among them if they are GGUF, in order
    strange_tokenizer: str = ""  # name of the only tokenizer that comes with safetensors, if it cannot be read
    alternative: str = ""  # another type of the repository or its original, for a person whose choice cannot be read

    @property
    def stored(self) -> Mapping[str, str]:
        """Names in the store of the GGUF files, by their names on the hub."""
        names = [file.name for file in self.gguf]
        return dict(zip(names, names_in_store(names), strict=True)) if names else {}


def parse_hub_source(text: str) -> HubSource | None:
    """Parse a hub source. Returns None for any other text."""
    match = _SOURCE.fullmatch(text)
    if match is None:
        return None
    return HubSource(repo=match["repo"], type=match["type"] or "", revision=match["revision"] or "main")


def pinned_text(repo: str, commit: str) -> str:
    """Return a manifest's text for a pulled model's source."""
    return f"hub:{repo}@{commit}"


def parse_pinned(text: str) -> HubSource | None:
    """Parse the output of ``pinned_text``, with the commit as revision. Returns None for any other text."""
    match = _PINNED.fullmatch(text)
    return HubSource(repo=match["repo"], revision=match["commit"]) if match and ".." not in text else None


def plan_hub(source: HubSource, *, endpoint: str | None = None) -> HubPlan:
    """List the model's files on the hub. Raises ModelUnknown, ModelDownloadFailed, ModelInvalid."""
    plan = _plan(source, list_hub(source, endpoint=endpoint))
    for file in plan.files:
        check_metadata_size(file.name, file.num_bytes)
    return plan


def hub_types(source: HubSource, *, endpoint: str | None = None) -> list[GgufChoice]:
    """Return the types between which a pull of ``source`` needs a choice, largest first; empty if it needs none.

    Raises ModelUnknown, ModelDownloadFailed.
    """
    if source.type:
        return []
    files = list_hub(source, endpoint=endpoint).files
    whole = [] if _has_safetensors(files) else [choice for choice in gguf_choices(files) if not choice.missing]
    return whole if len(whole) > 1 else []


def list_hub(source: HubSource, *, endpoint: str | None = None) -> HubListing:
    """List a repository. Raises ModelUnknown, ModelDownloadFailed, ModelInvalid."""
    from huggingface_hub import HfApi

    with hub_errors(source):
        api = HfApi(endpoint=endpoint)
        info = api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=CONTACT_TIMEOUT_S)
    listed = [_planned(file) for file in info.siblings or ()]
    quantised = (_QUANTISED.fullmatch(tag) for tag in info.tags or ())
    return HubListing(
        commit=str(info.sha),
        files=tuple(file for file in listed if file),
        original=next((match["repo"] for match in quantised if match), ""),
    )


def fetch_hub(
    plan: HubPlan,
    folder: Path,
    on_progress: OnProgress,
    *,
    check: Callable[[Path], None],
    endpoint: str | None = None,
) -> None:
    """Fetch a plan's files into ``folder``, metadata first.

    ``check`` gets the folder before any weights are fetched, and raises for an unusable model. Raises its errors,
    ModelDownloadFailed (partial files stay), ModelInvalid (a file with a wrong hash is deleted).
    """
    total = sum(file.num_bytes for file in plan.files)
    counter = ProgressCounter(on_progress, "download", total)
    metadata = [file for file in plan.files if file.name in METADATA_NAMES]
    weights = [file for file in plan.files if file.name not in METADATA_NAMES]
    for file in metadata:
        _fetch(plan, file, folder, counter, endpoint)
    check(folder)
    for file in weights:
        _fetch(plan, file, folder, counter, endpoint, stored=plan.stored.get(file.name, ""))


@contextmanager
def suggesting_alternative(plan: HubPlan) -> Generator[None]:
    """Name the plan's alternative as the next step of an error about the plan's format."""
    try:
        yield
    except ArchitectureUnsupported:
        raise  # the alternative has the same architecture
    except ModelInvalid as error:
        if plan.alternative:
            error.next_step = f"edgepipe models pull {plan.alternative}"
        raise


def _planned(file: Any) -> PlannedFile | None:
    """Return a file of the repository's top or a GGUF file with its size and hash, or None for others."""
    name = str(file.rfilename)
    if ("/" in name and not name.endswith(".gguf")) or file.size is None:
        return None
    sha256 = str(file.lfs.sha256) if file.lfs else ""
    return PlannedFile(
        name=check_member_name(name, where="the hub"),
        num_bytes=int(file.size),
        sha256=sha256,
        git_sha1="" if sha256 else str(file.blob_id or ""),
    )


def _plan(source: HubSource, listing: HubListing) -> HubPlan:
    """Choose metadata and one set of weights: safetensors if present and no type is given, else one GGUF model."""
    commit, files = listing.commit, listing.files
    choices = gguf_choices(files)
    if not source.type and _has_safetensors(files):
        by_name = {file.name: file for file in files}
        metadata = [by_name[name] for name in METADATA_NAMES if name in by_name]
        shards = [file for file in files if "/" not in file.name and fnmatch.fnmatchcase(file.name, SHARDS)]
        single = [by_name[SINGLE_FILE]] if SINGLE_FILE in by_name else []
        weights = shards if INDEX_FILE in by_name and shards else single  # mlx-lm writes an index of one file, too
        return HubPlan(
            source=source,
            commit=commit,
            model_id=source.repo,
            files=(*metadata, *weights),
            strange_tokenizer="" if TOKENIZER_FILE in by_name else next(filter(by_name.get, _STRANGE_TOKENIZERS), ""),
            alternative=_alternative(source, choices, listing.original),
        )
    if not choices:
        raise _without_gguf(source, files)
    chosen = choose_type(source.type, choices, repo=source.repo)
    others = [choice for choice in choices if choice.label != chosen.label]
    return HubPlan(
        source=source,
        commit=commit,
        model_id=stored_name(source.repo, chosen, alone=len(choices) == 1),
        files=chosen.files,
        gguf=chosen.files,
        alternative=_alternative(source, others, listing.original),
    )


def _alternative(source: HubSource, choices: Sequence[GgufChoice], original: str) -> str:
    """Return what a pull of ``source`` may fetch instead: another type, else the original; empty without either."""
    usable = [choice for choice in choices if choice.usable]
    return f"{source.repo}:{recommended_label(usable)}" if usable else original


def _without_gguf(source: HubSource, files: Sequence[PlannedFile]) -> ModelInvalid:
    """Return the error for a repository from which a pull would need a GGUF file."""
    if _has_safetensors(files):
        return ModelInvalid(
            f"'{source.repo}' has no file of the type '{source.type}'",
            fact="its weights are safetensors; only GGUF files have such types",
            next_step=f"edgepipe models pull {source.repo}",
        )
    pickled = next((file.name for file in files if file.name.endswith(_PICKLES)), "")
    return ModelInvalid(
        f"'{source.repo}' has no usable weights",
        fact=f"'{pickled}' could run code and is never read"
        if pickled
        else "it has neither model.safetensors nor a GGUF file",
        next_step="choose a repository with safetensors or GGUF files",
    )


def _has_safetensors(files: Sequence[PlannedFile]) -> bool:
    return any(file.name in (INDEX_FILE, SINGLE_FILE) for file in files)


def _fetch(
    plan: HubPlan, file: PlannedFile, folder: Path, counter: ProgressCounter, endpoint: str | None, *, stored: str = ""
) -> None:
    """Fetch a file under the name ``stored``; empty: its own. A whole one of an earlier pull is not fetched again."""
    path, target = folder / file.name, folder / (stored or file.name)
    if target.is_file() and target.stat().st_size == file.num_bytes and _hash_fits(file, target):
        counter.add(file.name, file.num_bytes)
        return
    import huggingface_hub

    download = cast("Any", huggingface_hub).hf_hub_download  # its overloads leave types open
    counted = _Counted(counter, file)

    def attempt() -> None:
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

    _persist(attempt, counter, file)
    _verify(file, path)
    counted.finish()
    if path != target:
        path.replace(target)
        for parent in path.relative_to(folder).parents[:-1]:
            with suppress(OSError):  # other parts may still be in it
                (folder / parent).rmdir()


def _persist(attempt: Callable[[], None], counter: ProgressCounter, file: PlannedFile) -> None:
    """Repeat an attempt, which resumes, while its failures may pass and the pull has begun. Raises the last failure."""
    heard_s, pause_s = monotonic(), _PAUSE_S
    while True:
        before_bytes = counter.done_bytes
        try:
            attempt()
            return
        except ModelDownloadFailed as error:
            if counter.done_bytes > before_bytes:
                heard_s, pause_s = monotonic(), _PAUSE_S
            if not counter.done_bytes or not _may_pass(error) or monotonic() - heard_s >= _PATIENCE_S:
                raise
        counter.waits(file.name)
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _may_pass(error: ModelDownloadFailed) -> bool:
    """Return whether the same request may succeed later: the network failed, or the hub is busy or has a fault."""
    status = _status_of(error)
    return status >= 500 or status in (408, 429) if status else error.next_step == _NETWORK_STEP


def _status_of(error: BaseException | None) -> int:
    """Return the HTTP status that caused an error; 0 without one."""
    while error is not None:
        if status := getattr(getattr(error, "response", None), "status_code", 0):
            return int(status)
        error = error.__cause__
    return 0


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

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                quiet = kwargs | {"file": io.StringIO()}  # it writes an empty line at its end
                cast("Any", super()).__init__(*args, **quiet)

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
            fact=plain(exc),
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
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            with disk_errors(source.repo):  # partial files are on this disk
                raise
        raise _unreachable(source, exc) from exc
    except Exception as exc:
        if type(exc).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "hf_xet", "huggingface_hub"):
            raise
        raise _unreachable(source, exc) from exc


def _unreachable(source: HubSource, exc: BaseException) -> ModelDownloadFailed:
    return ModelDownloadFailed(
        f"'{source.repo}' could not be fetched from the hub",
        fact=plain(exc),
        next_step=_STEPS.get(_status_of(exc), _HUB_STEP if _status_of(exc) >= 500 else _NETWORK_STEP),
    )


_NETWORK_STEP = "check the network and pull again (the pull resumes), or pull a local folder"
_HUB_STEP = "the hub has a fault: pull again later (the pull resumes), or pull a local folder"
_STEPS = {
    401: "the hub does not accept this machine's token: hf auth login (another one), or hf auth logout (none)",
    403: "check what this machine's token may read (hf auth whoami), then pull again (the pull resumes)",
    429: "wait five minutes, then pull again (the pull resumes); with a token the hub allows more: hf auth login",
}
