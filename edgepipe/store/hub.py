"""Models on the Hugging Face Hub: list files and sizes, choose what a pull fetches, translate the hub's errors.

``huggingface_hub`` is imported only when a pull begins. It opens connections and reads the token, the endpoint and the
proxy's settings. ``hub_fetch`` fetches the files.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from edgepipe.errors import (
    ArchitectureUnsupported,
    EdgepipeError,
    ModelDownloadFailed,
    ModelInvalid,
    ModelUnknown,
    SendTimeout,
)
from edgepipe.files.disk import disk_errors
from edgepipe.files.progress import PlannedFile
from edgepipe.files.safe_path import check_member_name
from edgepipe.plain_words import plain
from edgepipe.store.gguf_names import GgufChoice, choose_type, gguf_choices, recommended_label, stored_name
from edgepipe.store.install import METADATA_NAMES, check_metadata_size
from edgepipe.weights.gguf_split import names_in_store
from edgepipe.weights.manifest import TOKENIZER_FILE
from edgepipe.weights.safetensors_file import INDEX_FILE, SINGLE_FILE

SHARDS = "model*-of-*.safetensors"  # Qwen3.5 has model.safetensors-00001-of-00004.safetensors
CONTACT_TIMEOUT_S = 10.0  # time for the hub's first answer
_LISTING_S = 60.0  # time for a whole list: the largest have a few MB
_STRANGE_TOKENIZERS = ("tekken.json", "tiktoken.model", "tokenizer.model")  # files of Mistral, Kimi and SentencePiece
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # PyTorch's own formats

_QUANTISED = re.compile(r"base_model:quantized:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})", re.ASCII)
_LOGIN_REQUIRED = 511  # answer of networks with a login page (RFC 6585, section 6)
_RATE_LIMIT = re.compile(r"\bt=(\d{1,9})\b")  # seconds until the hub answers again
_T = TypeVar("_T")
_PINNED = re.compile(
    r"hub:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})@(?P<commit>[0-9a-f]{40})", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository, the type of the GGUF file to fetch, and the revision."""

    repo: str  # ORG/NAME
    type: str = ""  # empty: the only one, or safetensors
    revision: str = "main"
    file: str = ""  # path of the GGUF file, or of one of its parts, if a person has named it


@dataclass(frozen=True, slots=True, kw_only=True)
class HubListing:
    """A repository's files at one commit."""

    commit: str
    files: tuple[PlannedFile, ...]  # the top folder's, and all GGUF files
    original: str = ""  # the repository that this one quantises, as its makers say


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDownload:
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


def pinned_text(repo: str, commit: str) -> str:
    """Return a manifest's text for a pulled model's source."""
    return f"hub:{repo}@{commit}"


def parse_pinned(text: str) -> HubSource | None:
    """Parse the output of ``pinned_text``, with the commit as revision. Returns None for any other text."""
    match = _PINNED.fullmatch(text)
    return HubSource(repo=match["repo"], revision=match["commit"]) if match and ".." not in text else None


def plan_hub(source: HubSource, *, endpoint: str | None = None) -> HubDownload:
    """List the model's files on the hub. Raises ModelUnknown, ModelDownloadFailed, ModelInvalid."""
    plan = _plan(source, list_hub(source, endpoint=endpoint))
    for file in plan.files:
        check_metadata_size(file.name, file.num_bytes)
    return plan


def hub_types(source: HubSource) -> list[GgufChoice]:
    """Return the types between which a pull of ``source`` needs a choice, largest first; empty if it needs none.

    Raises ModelUnknown, ModelDownloadFailed.
    """
    if source.type or source.file:
        return []
    files = list_hub(source).files
    whole = [] if _has_safetensors(files) else [choice for choice in gguf_choices(files) if not choice.missing]
    return whole if len(whole) > 1 else []


def list_hub(source: HubSource, *, endpoint: str | None = None) -> HubListing:
    """List a repository. Raises ModelUnknown, ModelDownloadFailed, ModelInvalid."""
    from huggingface_hub import HfApi

    with hub_errors(source):
        ask = partial(
            HfApi(endpoint=endpoint).model_info,
            source.repo,
            revision=source.revision,
            files_metadata=True,
            timeout=CONTACT_TIMEOUT_S,
        )
        try:
            info = _within(_LISTING_S, ask)
            siblings, tags = list(info.siblings or ()), list(info.tags or ())
        except json.JSONDecodeError as exc:
            raise no_hub_answer(source, "no JSON") from exc
        except (TypeError, KeyError, AttributeError) as exc:  # JSON, but not a model's description
            raise no_hub_answer(source, "not the description of a model") from exc
    listed = [_planned(file) for file in siblings]
    quantised = (_QUANTISED.fullmatch(tag) for tag in tags)
    return HubListing(
        commit=str(info.sha),
        files=tuple(file for file in listed if file),
        original=next((match["repo"] for match in quantised if match), ""),
    )


@contextmanager
def suggesting_alternative(plan: HubDownload) -> Generator[None]:
    """Name the plan's alternative as the next step of an error about the plan's format."""
    try:
        yield
    except ArchitectureUnsupported:
        raise  # the alternative has the same architecture
    except ModelInvalid as error:
        if plan.alternative:
            raise error.changed(next_step=f"edgepipe models pull {plan.alternative}") from error
        raise


def _planned(file: Any) -> PlannedFile | None:
    """Return a file of the repository's top or a GGUF file with its size and hash, or None for others."""
    name = str(file.rfilename)
    if ("/" in name and not name.lower().endswith(".gguf")) or file.size is None:
        return None
    sha256 = str(file.lfs.sha256) if file.lfs else ""
    return PlannedFile(
        name=check_member_name(name, where="the hub"),
        num_bytes=int(file.size),
        sha256=sha256,
        git_sha1="" if sha256 else str(file.blob_id or ""),
    )


def _plan(source: HubSource, listing: HubListing) -> HubDownload:
    """Choose metadata and one set of weights: safetensors if present and no type is given, else one GGUF model."""
    commit, files = listing.commit, listing.files
    choices = gguf_choices(files)
    if not source.type and not source.file and _has_safetensors(files):
        by_name = {file.name: file for file in files}
        metadata = [by_name[name] for name in METADATA_NAMES if name in by_name]
        shards = [file for file in files if "/" not in file.name and fnmatch.fnmatchcase(file.name, SHARDS)]
        single = [by_name[SINGLE_FILE]] if SINGLE_FILE in by_name else []
        weights = shards if INDEX_FILE in by_name and shards else single  # mlx-lm writes an index of one file, too
        return HubDownload(
            source=source,
            commit=commit,
            model_id=source.repo,
            files=(*metadata, *weights),
            strange_tokenizer="" if TOKENIZER_FILE in by_name else next(filter(by_name.get, _STRANGE_TOKENIZERS), ""),
            alternative=_alternative(source, choices, listing.original),
        )
    if not choices:
        raise _without_gguf(source, files)
    of_file = [choice for choice in choices if source.file in [file.name for file in choice.files]]
    chosen = choose_type("" if of_file else source.type, of_file or choices, repo=source.repo)
    others = [choice for choice in choices if choice.label != chosen.label]
    return HubDownload(
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


def may_pass(error: EdgepipeError) -> bool:
    """Return whether the same request may succeed later: the network failed, or the hub is busy or has a fault."""
    if isinstance(error, SendTimeout):
        return True
    status = _status_of(error)
    if not isinstance(error, ModelDownloadFailed):
        return False
    if status == _LOGIN_REQUIRED:
        return False
    return status >= 500 or status in (408, 429) if status else error.next_step == _NETWORK_STEP


def failure_text(error: EdgepipeError) -> str:
    """Say in a few words why a request is sent again."""
    if status := _status_of(error):
        return (
            f"the hub is busy (status {status})" if status in (408, 429) else f"the hub has a fault (status {status})"
        )
    return "the hub is silent" if isinstance(error, SendTimeout) else "no connection to the hub, or it broke"


def _status_of(error: BaseException | None) -> int:
    """Return the HTTP status that caused an error; 0 without one."""
    return int(getattr(_response_of(error), "status_code", 0))


def _response_of(error: BaseException | None) -> Any:
    """Return the HTTP response that caused an error; None without one."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return response
        error = error.__cause__
    return None


def _asked_pause_s(error: BaseException) -> float:
    """Return the pause that the hub asks for in ``Retry-After`` or ``RateLimit``; 0 without one."""
    headers = getattr(_response_of(error), "headers", {})
    asked = headers.get("Retry-After", "").strip()
    if asked.isascii() and asked.isdigit():
        return float(asked[:9])
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())
    limit = _RATE_LIMIT.search(headers.get("RateLimit", ""))
    return float(limit[1]) if limit else 0.0


def _within(seconds: float, ask: Callable[[], _T]) -> _T:
    """Call the library on a thread, which is left behind at the deadline: the library limits single reads only.

    Raises TimeoutError, and what ``ask`` raises.
    """
    answer: Future[_T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as exc:
            answer.set_exception(exc)

    Thread(target=work, name="hub-listing", daemon=True).start()
    return answer.result(timeout=seconds)


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
    if _status_of(exc) == _LOGIN_REQUIRED:
        return no_hub_answer(source, f"status {_LOGIN_REQUIRED}")
    error = ModelDownloadFailed(
        f"'{source.repo}' could not be fetched from the hub",
        fact=plain(exc),
        next_step=_STEPS.get(_status_of(exc), _HUB_STEP if _status_of(exc) >= 500 else _NETWORK_STEP),
    )
    error.retry_after_s = _asked_pause_s(exc)
    return error


def no_hub_answer(source: HubSource, what: str) -> ModelDownloadFailed:
    """Return the error for an answer that the hub cannot have given, such as a page instead of data."""
    return ModelDownloadFailed(
        f"'{source.repo}' could not be fetched from the hub",
        fact=f"the hub's answer is {what}: is there a login page on this network?",
        next_step="open any web page in a browser and log in, then pull again (the pull resumes)",
    )


_NETWORK_STEP = "check the network and pull again (the pull resumes), or pull a local folder"
_HUB_STEP = "the hub has a fault: pull again later (the pull resumes), or pull a local folder"
_STEPS = {
    401: "the hub does not accept this machine's token: hf auth login (another one), or hf auth logout (none)",
    403: "check what this machine's token may read (hf auth whoami), then pull again (the pull resumes)",
    429: "wait five minutes, then pull again (the pull resumes); with a token the hub allows more: hf auth login",
}
