"""Text to token ids and back. The ``tokenizers`` package is imported when a tokenizer is loaded, not before."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.errors import ModelInvalid
from edgepipe.model.detokenizer import Detokenizer, token_bytes
from edgepipe.model.tokenizer_child import TOLD_BYTES
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Library

MAX_TOKENIZER_BYTES = 64 << 20  # the largest in use (262,144 tokens) take about 34 MB
_SHORT_CHARS = 4096  # encoded within 1 ms
_CHECK_S = 60  # wall time for a check that the kernel ends after 10 s of CPU time

CHAT_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "</s>",
)
"""Special tokens that end an answer, whatever the model's config lists."""


TOOL_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")
"""Tokens around tool calls: part of an answer's text, even where the model counts them as special."""


class Tokenizer:
    """One model's tokenizer. Calls are synchronous and cost about 1 ms per 5,000 characters."""

    def __init__(self, library: _Library, *, vocab_size: int | None = None) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._vocab_size = vocab_size or library.get_vocab_size(with_added_tokens=True)
        added = library.get_added_tokens_decoder()
        self._special = {token.content: index for index, token in added.items() if token.special}
        self._token_bytes = token_bytes(library)

    @classmethod
    def from_file(cls, path: Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Load ``tokenizer.json``. Raises ModelInvalid if it is missing, too large or damaged."""
        return cls(_load(path), vocab_size=vocab_size)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Rebuild from GGUF metadata. Raises ModelInvalid."""
        from edgepipe.model.gguf_tokenizer import rebuild_tokenizer

        return cls(rebuild_tokenizer(metadata))

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one below this."""
        return self._vocab_size

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens by their text."""
        return self._special

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Special tokens that have no text in an answer."""
        return frozenset(token for name, token in self._special.items() if name not in TOOL_MARKS)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; ``add_special`` puts the model's begin token in front.

        Special tokens that stand in the text are honoured. A chat template's result wants ``add_special=False``: it
        brings its own. Raises ModelInvalid if the tokenizer gives an id that the model does not have.

        Safe in a thread beside others: long texts are encoded without the interpreter's lock.
        """
        with _panics_translated():
            ids = self._ids(text, add_special)
        if ids and max(ids) >= self._vocab_size:
            raise ModelInvalid(
                "the tokenizer does not fit the model",
                fact=f"it gave the token id {max(ids)}, the model has {self._vocab_size}",
            )
        return ids

    def _ids(self, text: str, add_special: bool) -> list[int]:
        """The library's plain call holds the interpreter's lock all the while, its call for batches does not."""
        if len(text) <= _SHORT_CHARS:
            return self._library.encode(text, add_special_tokens=add_special).ids
        return self._library.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, finish: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become replacement characters.

        ``finish`` False leaves out a character that is incomplete at the end, for a text that goes on.
        """
        detokenizer = self.detokenizer(skip_special=skip_special)
        return "".join([*(detokenizer.add(token) for token in ids), detokenizer.finish() if finish else ""])

    def detokenizer(
        self, *, skip_special: bool = True, keep: Collection[str] = (), before: Sequence[int] = ()
    ) -> Detokenizer:
        """A fresh incremental decoder for one choice of a request; ``keep``: special tokens that have text all the
        same, such as those that begin a tool call; ``before``: tokens whose text the choice continues."""
        skipped = (token for text, token in self._special.items() if text not in keep) if skip_special else ()
        return Detokenizer(self._token_bytes, frozenset(skipped), before=before)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for by itself."""
        return self._token_bytes(token)

    def end_ids(self, configured: Sequence[int]) -> tuple[int, ...]:
        """The ids that end an answer: the config's and those of the chat ends that are special tokens here."""
        ends = [self._special[name] for name in CHAT_ENDS if name in self._special]
        return tuple(dict.fromkeys([*configured, *ends]))

    def largest_id(self) -> int:
        """The largest id in the vocabulary, added tokens included."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    def save(self, path: Path) -> None:
        """Write ``tokenizer.json``."""
        path.write_text(self._library.to_str(), encoding="utf-8")


@contextmanager
def _panics_translated() -> Generator[None]:
    """The library gives up on patterns that backtrack too long with an exception that ``except Exception`` misses."""
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise ModelInvalid("the model's tokenizer gave up on the text", fact=str(exc)[:200]) from exc


def check_tokenizer(path: Path, *, vocab_size: int) -> str:
    """Try a foreign ``tokenizer.json`` in a child with limits; return the digest of its canonical form.

    Raises ModelInvalid: damaged, too large, too slow.
    """
    _check_size(path)
    command = (sys.executable, "-P", "-m", "edgepipe.model.tokenizer_child", str(path), str(vocab_size))
    with tempfile.TemporaryFile() as told:  # the child bounds what it writes to files
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=told, stderr=told, timeout=_CHECK_S, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise _unusable(path, f"it was not read within {_CHECK_S} s") from exc
        told.seek(0)
        lines = told.read(TOLD_BYTES).decode("utf-8", "replace").strip().splitlines()
    if done.returncode < 0:
        raise _unusable(path, "reading it took more than 10 s of CPU time, or more memory than it may have")
    if done.returncode:
        raise _unusable(path, lines[-1][:200] if lines else "its child process said nothing")
    return lines[-1]  # behind whatever the library had to say


def _load(path: Path) -> _Library:
    from tokenizers import Tokenizer as Library

    _check_size(path)
    try:
        return Library.from_file(str(path))
    except Exception as exc:  # the library raises bare Exceptions
        raise _unusable(path, str(exc)[:200]) from exc


def _check_size(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise ModelInvalid("the model has no tokenizer", fact=f"{path.name}: {exc.strerror}") from exc
    if size > MAX_TOKENIZER_BYTES:
        raise ModelInvalid(
            f"'{path.name}' is too large",
            fact=f"{format_bytes(size)}, at most {format_bytes(MAX_TOKENIZER_BYTES)} are read",
        )


def _unusable(path: Path, fact: str) -> ModelInvalid:
    return ModelInvalid(
        f"'{path.name}' is no tokenizer that can be used",
        fact=fact,
        next_step="fetch the model again, or choose another",
    )
