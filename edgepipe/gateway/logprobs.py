"""Log-probabilities in OpenAI's two forms: for chats and for completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from edgepipe.gateway.models import Assets
from edgepipe.sampling import TokenLogprobs

_LOWEST = -9999.0  # for impossible tokens: JSON has no infinity


def chat_logprobs(assets: Assets, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Format the tokens that have text; their joined texts are the answer."""
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
    """Formats one choice of a completion, piece by piece. Offsets count through the text that the client gets."""

    def __init__(self, assets: Assets, *, before: Sequence[int] = ()) -> None:
        """``before``: tokens without echo whose text the choice continues."""
        self._assets = assets
        self._detokenizer = assets.new_detokenizer(before=before)
        self._offset = 0  # characters

    def add(self, ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None]) -> dict[str, Any]:
        """Format the next tokens. The first token of an echoed prompt has no score: its entry must be None."""
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
        """Set the next token's offset, because the echo is the prompt's original text."""
        self._offset = offset

    def _top(self, sampled: str, entry: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens and the sampled token."""
        return {sampled: _finite(entry.logprob)} | {
            self._assets.token_text(token): _finite(value) for token, value in reversed(entry.top)
        }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
