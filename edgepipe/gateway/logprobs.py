"""Log-probabilities in OpenAI's two forms: for chats and for completions. Both are made in runs of a few tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgepipe.gateway.json_pieces import ArrayParts
from edgepipe.gateway.models import Assets
from edgepipe.sampling import TokenLogprobs

_LOWEST = -9999.0  # stands for impossible tokens: JSON has no infinity
RUN_TOKENS = 24  # tokens written at once; with the most alternatives 504 numbers, which take some 3 ms

Entry = tuple[int, TokenLogprobs | None]  # a token and its score


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens with their log-probabilities."""

    ids: Sequence[int]
    scores: Sequence[TokenLogprobs]
    num_unscored: int = 0  # tokens at the beginning without a score: the first token of a prompt

    def cut(self) -> Iterator[Scored]:
        """Yield the tokens in runs of RUN_TOKENS."""
        for start in range(0, len(self.ids), RUN_TOKENS):
            first = start - self.num_unscored
            yield Scored(
                self.ids[start : start + RUN_TOKENS],
                self.scores[max(0, first) : first + RUN_TOKENS],
                num_unscored=max(0, -first),
            )

    def runs(self) -> Iterator[list[Entry]]:
        """Yield the entries of ``cut``."""
        for run in self.cut():
            yield list(zip(run.ids, [*[None] * run.num_unscored, *run.scores], strict=True))


def chat_logprobs(assets: Assets, scored: Scored) -> ArrayParts:
    """Format the tokens that have text; their joined texts are the answer."""
    return ArrayParts(
        [_chat_entry(assets, token, entry) for token, entry in run if entry is not None and assets.token_bytes(token)]
        for run in scored.runs()
    )


def _chat_entry(assets: Assets, token: int, entry: TokenLogprobs) -> dict[str, Any]:
    top = [_chat_token(assets, other, value) for other, value in entry.top]
    return _chat_token(assets, token, entry.logprob) | {"top_logprobs": top}


def _chat_token(assets: Assets, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": assets.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(assets.token_bytes(token)),
    }


class TextLogprobs:
    """Formats one choice of a completion, piece by piece. Offsets count through the text that the client gets."""

    def __init__(self, assets: Assets, *, before: Sequence[int] = ()) -> None:
        """``before``: tokens without echo whose text the choice continues."""
        self._assets = assets
        self._detokenizer = assets.new_detokenizer(before=before)
        self.offset = 0  # characters before the next token; set it after an echo, which is the prompt's original text

    def add(self, scored: Scored) -> dict[str, Any]:
        """Return the next tokens' fields, which are made as they are written."""
        return self.whole([(scored, None)])

    def whole(self, parts: Sequence[tuple[Scored, int | None]]) -> dict[str, Any]:
        """Return the fields of the next tokens, which are made as they are written.

        parts  tokens, and the offset after them, None: by their text
        """

        def each(form: Callable[[Entry], object]) -> ArrayParts:
            return ArrayParts([form(entry) for entry in run] for scored, _ in parts for run in scored.runs())

        return {
            "tokens": each(lambda entry: self._assets.token_text(entry[0])),
            "token_logprobs": each(lambda entry: None if entry[1] is None else _finite(entry[1].logprob)),
            "top_logprobs": each(self._top),
            "text_offset": ArrayParts(self._offsets(parts)),
        }

    def _offsets(self, parts: Iterable[tuple[Scored, int | None]]) -> Iterator[list[int]]:
        for scored, end in parts:
            for run in scored.runs():
                yield [self._pass(token) for token, _ in run]
            if end is not None:
                self.offset = end

    def _pass(self, token: int) -> int:
        """Return a token's offset, and advance to the next."""
        offset = self.offset
        self.offset += len(self._detokenizer.add(token))
        return offset

    def _top(self, scored: Entry) -> dict[str, float] | None:
        """Return the likeliest tokens and the sampled token."""
        token, entry = scored
        if entry is None:
            return None
        return {self._assets.token_text(token): _finite(entry.logprob)} | {
            self._assets.token_text(token): _finite(value) for token, value in reversed(entry.top)
        }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
