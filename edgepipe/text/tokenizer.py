"""Convert text to token ids and back. The ``tokenizers`` package is imported only when a tokenizer is loaded."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.errors import ModelInvalid
from edgepipe.plain_words import plain
from edgepipe.text.detokenizer import Detokenizer, token_bytes
from edgepipe.text.token_marks import CHAT_ENDS, TOOL_MARKS
from edgepipe.text.tokenizer_child import TOLD_BYTES
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Library

MAX_TOKENIZER_BYTES = 64 << 20  # the largest in use (262,144 tokens) take about 34 MB
_SHORT_CHARS = 4096  # longest text that is encoded within 1 ms
_CHECK_S = 60  # wall time of a check that the kernel limits to 10 s of CPU time

_CHANNELS = frozenset({"<|channel|>", "<|return|>"})  # a vocabulary with both: ``<|end|>`` ends only a message


class Tokenizer:
    """One model's tokenizer. Calls are synchronous and cost about 1 ms per 5,000 characters."""

    def __init__(self, library: _Library, *, vocab_size: int | None = None) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._vocab_size = vocab_size or library.get_vocab_size(with_added_tokens=True)
        added = library.get_added_tokens_decoder()
        self._special = {
            token.content: index for index, token in added.items() if token.special or token.content in CHAT_ENDS
        }
        self._token_bytes = token_bytes(library)

    @classmethod
    def from_file(cls, path: Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Load a ``tokenizer.json``. Raises ModelInvalid if it is missing, too large or damaged."""
        return cls(_load(path), vocab_size=vocab_size)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Rebuild a tokenizer from GGUF metadata. Raises ModelInvalid."""
        from edgepipe.text.gguf_tokenizer import rebuild_tokenizer

        return cls(rebuild_tokenizer(metadata))

    @property
    def vocab_size(self) -> int:
        """Number of ids; the largest id is one less."""
        return self._vocab_size

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of special tokens, by text."""
        return self._special

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Special tokens without text in an answer."""
        return frozenset(token for name, token in self._special.items() if name not in TOOL_MARKS)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Encode a text. ``add_special`` puts the model's begin token in front.

        Special tokens in the text are recognised. Use ``add_special=False`` for a chat template's result, which
        includes them. Raises ModelInvalid if the tokenizer returns an id outside the model's vocabulary.

        Thread-safe: long texts are encoded without the interpreter's lock.
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
        """Encode a text. The library's plain call holds the interpreter's lock; its batch call releases it."""
        if len(text) <= _SHORT_CHARS:
            return self._library.encode(text, add_special_tokens=add_special).ids
        return self._library.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, finish: bool = True) -> str:
        """Decode token ids. Bytes that are not UTF-8 become replacement characters.

        ``finish`` False leaves out an incomplete character at the end, for a text that continues.
        """
        detokenizer = self.detokenizer(skip_special=skip_special)
        return "".join([*(detokenizer.add(token) for token in ids), detokenizer.finish() if finish else ""])

    def detokenizer(
        self, *, skip_special: bool = True, keep: Collection[str] = (), before: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a new incremental decoder for one choice of a request.

        keep    special tokens that have text nevertheless, such as those that begin a tool call
        before  tokens whose text the choice continues
        """
        skipped = (token for text, token in self._special.items() if text not in keep) if skip_special else ()
        return Detokenizer(self._token_bytes, frozenset(skipped), before=before)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a single token."""
        return self._token_bytes(token)

    def end_ids(self, configured: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that end an answer: the config's, and the chat ends among the special tokens."""
        ends = [self._special[name] for name in CHAT_ENDS if name in self._special]
        if self._special.keys() >= _CHANNELS and "<|end|>" in self._special:
            ends.remove(self._special["<|end|>"])
        return tuple(dict.fromkeys([*configured, *ends]))

    def largest_id(self) -> int:
        """Return the largest id in the vocabulary, including added tokens."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    def tokens(self) -> Mapping[int, str]:
        """Return the text of each id as the vocabulary has it, including added tokens."""
        return {token: text for text, token in self._library.get_vocab(with_added_tokens=True).items()}

    def added_ids(self) -> Collection[int]:
        """Return the ids of special and other added tokens."""
        return self._library.get_added_tokens_decoder().keys()

    def save(self, path: Path) -> None:
        """Write ``tokenizer.json``."""
        path.write_text(self._library.to_str(), encoding="utf-8")


@contextmanager
def _panics_translated() -> Generator[None]:
    """Translate the library's panic on excessive backtracking, which ``except Exception`` does not catch."""
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise ModelInvalid("the model's tokenizer gave up on the text", fact=plain(exc)) from exc


def check_tokenizer(path: Path, *, vocab_size: int) -> str:
    """Test a foreign ``tokenizer.json`` in a child with limits. Return the digest of its canonical form.

    Raises ModelInvalid: damaged, too large, too slow.
    """
    _check_size(path)
    command = (sys.executable, "-P", "-m", "edgepipe.text.tokenizer_child", str(path), str(vocab_size))
    with tempfile.TemporaryFile() as output:  # the child limits its file size
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_CHECK_S, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise _unusable(path, f"it was not read within {_CHECK_S} s") from exc
        output.seek(0)
        lines = output.read(TOLD_BYTES).decode("utf-8", "replace").strip().splitlines()
    if done.returncode < 0:
        raise _unusable(path, "reading it exceeded 10 s of CPU time or its memory limit")
    if done.returncode:
        raise _unusable(path, lines[-1][:200] if lines else "its child process printed nothing")
    return lines[-1]  # the library may have printed something before it


def _load(path: Path) -> _Library:
    from tokenizers import Tokenizer as Library

    _check_size(path)
    try:
        return Library.from_file(str(path))
    except Exception as exc:  # the library raises bare Exceptions
        raise _unusable(path, plain(exc)) from exc


def _check_size(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise ModelInvalid("the model has no tokenizer", fact=f"{path.name}: {plain(exc)}") from exc
    if size > MAX_TOKENIZER_BYTES:
        raise ModelInvalid(
            f"'{path.name}' is too large",
            fact=f"{format_bytes(size)}, at most {format_bytes(MAX_TOKENIZER_BYTES)} are read",
        )


def _unusable(path: Path, fact: str) -> ModelInvalid:
    return ModelInvalid(
        f"'{path.name}' is not a usable tokenizer",
        fact=fact,
        next_step="fetch the model again, or choose another",
    )
