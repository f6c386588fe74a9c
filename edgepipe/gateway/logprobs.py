"""Log-probabilities as OpenAI's clients read them: one form in chats, another in completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from edgepipe.gateway.models import Assets
from edgepipe.sampling import TokenLogprobs

_LOWEST = -9999.0  # stands for a token that cannot come: JSON has no infinity


def chat_logprobs(assets: Assets, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Of the tokens that have text: theirs, joined, is the answer's."""
    content: list[dict[str, Any]] = []
    for token, entry in zip(ids, logprobs, strict=True):
        if assets.token_bytes(token):
            top = [_chat_token(assets, other, value) for other, value in entry.top]
            content.append(_chat_token(assets, token, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(assets: Assets, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": assets.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(assets.token_bytes(token)),
    }


class TextLogprobs:
    """Those of one choice of a completion, piece by piece: offsets count on through the text that the client gets."""

    def __init__(self, assets: Assets, *, before: Sequence[int] = ()) -> None:
        """``before``: tokens whose text the choice continues, and that are not echoed."""
        self._assets = assets
        self._detokenizer = assets.new_detokenizer(before=before)
        self._offset = 0  # characters

    def add(self, ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None]) -> dict[str, Any]:
        """The next tokens; None for one that has no log-probability (the first of an echoed prompt)."""
        part: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(ids, logprobs, strict=True):
            text = self._assets.token_text(token)
            part["tokens"].append(text)
            part["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            part["top_logprobs"].append(None if entry is None else self._top(text, entry))
            part["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.add(token))
        return part

    def move_to(self, offset: int) -> None:
        """Count on from here: an echoed prompt is shown as the client wrote it."""
        self._offset = offset

    def _top(self, sampled: str, entry: TokenLogprobs) -> dict[str, float]:
        """The token that came is among them, whether or not it is one of the likeliest."""
        return {sampled: _finite(entry.logprob)} | {
            self._assets.token_text(token): _finite(value) for token, value in reversed(entry.top)
        }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
