"""Files and batches as values, and the changes of a batch's status. PURE.

::

    validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired
        │               │
        ├──▶ failed     │
        └───────────────┴──▶ cancelling ──▶ cancelled

A batch whose time is over is ``finalizing`` while its unfinished lines are written to the error file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_LINES = 1_000_000  # requests of one batch
_MOST_KEEPERS = 8  # bound on the keepers that are remembered
MAX_WINDOW_S = 30 * 24 * 3600
_MIN_WINDOW_S = 60
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}


class IllegalChange(Exception):
    """The batch's status does not allow the change. The caller says so to its client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that a client uploaded, or that a batch wrote."""

    file_id: str
    owner: str
    num_bytes: int
    created_s: int
    expires_s: int
    filename: str
    purpose: Literal["batch", "batch_output"]

    def to_json(self) -> dict[str, Any]:
        """Return the file as OpenAI's API shows it."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchError:
    """Reason why a batch failed."""

    code: str
    message: str
    line: int | None = None  # counted from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInput:
    """Result of reading a batch's whole input once."""

    num_lines: int = 0  # count without empty lines
    model: str = ""  # model of the first good line; empty: that line names none
    errors: tuple[BatchError, ...] = ()  # reasons to refuse the whole batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of finished lines."""

    prompt: int = 0
    cached: int = 0  # part of the prompt tokens
    completion: int = 0
    reasoning: int = 0  # part of the completion tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        """Return the sums."""
        return TokenUsage(
            prompt=self.prompt + other.prompt,
            cached=self.cached + other.cached,
            completion=self.completion + other.completion,
            reasoning=self.reasoning + other.reasoning,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the counts as OpenAI's API shows them."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch. Counts and sizes are those of lines that are durable."""

    batch_id: str
    owner: str
    endpoint: str
    input_file: str
    completion_window: str
    created_s: int
    expires_s: int  # end of the completion window
    output_file: str  # id of the file that takes answers
    error_file: str  # id of the file that takes errors
    kept_s: int  # time from the end until both are deleted
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    status: Status = "validating"
    ends_as: Literal["completed", "expired"] = "completed"  # final status after ``finalizing``
    model: str = ""  # model of all lines; empty: the only served model
    num_lines: int = 0
    completed: int = 0
    failed: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    output_bytes: int = 0
    error_bytes: int = 0
    entered_s: Mapping[str, int] = field(default_factory=dict[str, int])  # time of each status so far
    errors: tuple[BatchError, ...] = ()
    copies: int = 1  # 2: another node should have a copy
    keeper: str = ""  # id of the node that keeps the copy; empty: none
    keepers: tuple[str, ...] = ()  # ids of the last nodes that were named: only they may take the batch over
    term: int = 0  # how often the batch was taken over
    handed_to: str = ""  # id of the node that took it over from this one

    @property
    def is_final(self) -> bool:
        """Whether the batch has ended."""
        return self.status in FINAL

    @property
    def wants_copy(self) -> bool:
        """Whether this node owns the batch and another node should have a copy."""
        return self.copies > 1 and not self.handed_to

    @property
    def all_lines_done(self) -> bool:
        """Whether every line has its result."""
        return self.completed + self.failed >= self.num_lines

    def checked(self, result: CheckedInput, *, now_s: int) -> Batch:
        """Begin to work, or fail, after the check of the input. A batch that was cancelled meanwhile stays so."""
        self._require("validating", "cancelling")
        if self.status == "cancelling":
            return self
        if result.errors:
            return replace(self._entering("failed", now_s), errors=result.errors)
        return replace(self._entering("in_progress", now_s), num_lines=result.num_lines, model=result.model)

    def counted(self, *, completed: int, failed: int, usage: TokenUsage, output_bytes: int, error_bytes: int) -> Batch:
        """Count lines whose results are durable; ``output_bytes`` and ``error_bytes`` are the files' new sizes."""
        self._require("in_progress", "finalizing", "cancelling")
        return replace(
            self,
            completed=self.completed + completed,
            failed=self.failed + failed,
            usage=self.usage + usage,
            output_bytes=output_bytes,
            error_bytes=error_bytes,
        )

    def finalizing(self, ends_as: Literal["completed", "expired"], *, now_s: int) -> Batch:
        """Stop to compute: all lines are done, or the time is over. No effect on a batch that does not compute."""
        if self.status != "in_progress":
            return self
        return replace(self._entering("finalizing", now_s), ends_as=ends_as)

    def cancelled(self, *, now_s: int) -> Batch:
        """Ask for the end. Raises IllegalChange for a batch that ends already."""
        if self.status == "cancelling":
            return self
        self._require("validating", "in_progress")
        return self._entering("cancelling", now_s)

    def handed_over(self, node_id: str, *, name: str, now_s: int) -> Batch:
        """Give the batch up: another node took it over. A batch whose lines all have results keeps its status."""
        given = replace(self, handed_to=node_id)
        if self.status not in ("validating", "in_progress", "cancelling"):
            return given
        text = f"machine {name} took this batch over while this machine was away; it goes on there"
        error = BatchError(code="taken_over", message=text)
        return replace(given._entering("cancelling", now_s), errors=(*self.errors, error))

    def kept_by(self, node_id: str) -> Batch:
        """Name the node that keeps the copy; empty: none."""
        if not node_id:
            return replace(self, keeper="")
        others = tuple(other for other in self.keepers if other != node_id)
        return replace(self, keeper=node_id, keepers=(*others, node_id)[-_MOST_KEEPERS:])

    def without_copy(self) -> Batch:
        """Let the copy go, if the batch has ended."""
        return replace(self, copies=1, keeper="") if self.is_final else self

    def ended(self, *, now_s: int) -> Batch:
        """Take the final status, once no line runs and the files are complete."""
        self._require("finalizing", "cancelling")
        return self._entering("cancelled" if self.status == "cancelling" else self.ends_as, now_s)

    def _entering(self, status: Status, now_s: int) -> Batch:
        return replace(self, status=status, entered_s={**self.entered_s, status: now_s})

    def _require(self, *statuses: Status) -> None:
        if self.status not in statuses:
            raise IllegalChange(f"the batch is {self.status}")

    def to_json(self, *, note: str = "", copy: str = "") -> dict[str, Any]:
        """Return the batch as OpenAI's API shows it.

        note  why it does not advance now
        copy  where its copy is; empty if it wants none
        """
        at: dict[str, int | None] = {
            f"{status}_at": self.entered_s.get(status) for status in (*FINAL, "in_progress", "finalizing", "cancelling")
        }
        errors = [{"code": e.code, "message": e.message, "param": None, "line": e.line} for e in self.errors]
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file if self.is_final and self.output_bytes else None,
            "error_file_id": self.error_file if self.is_final and self.error_bytes else None,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **at,
            "request_counts": {"total": self.num_lines, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.to_json(),
            "metadata": dict(self.metadata) or None,
            "edgepipe": {"note": note, "copies": self.copies, "copy": copy},
        }

    def to_text(self) -> str:
        """Return the batch as JSON for the database."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> Batch:
        """Read the JSON of ``to_text``."""
        values: dict[str, Any] = json.loads(text)
        values["usage"] = TokenUsage(**values["usage"])
        values["keepers"] = tuple(values.get("keepers", ()))
        values["errors"] = tuple(BatchError(**error) for error in values["errors"])
        return cls(**values)


def window_s(text: str) -> int | None:
    """Return the seconds of a completion window such as ``24h``, ``90m`` or ``7d``; None for any other text."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})([mhd])", text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    return seconds if _MIN_WINDOW_S <= seconds <= MAX_WINDOW_S else None


def in_turn(batches: Sequence[Batch], *, most: int) -> list[Batch]:
    """Choose the batches that run now: the oldest unfinished one of each user, of ``most`` users.

    Batches that are being cancelled end at once, whatever else runs. ``batches``: all unfinished ones, oldest first.
    """
    first: dict[str, Batch] = {}
    for batch in batches:
        if batch.status != "cancelling":
            first.setdefault(batch.owner, batch)
    return [*list(first.values())[:most], *(batch for batch in batches if batch.status == "cancelling")]
