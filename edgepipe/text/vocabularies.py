"""Whether one model's token ids mean the same to another model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edgepipe.errors import ConfigInvalid
from edgepipe.text.tokenizer import Tokenizer

_MOST_SHOWN = 24  # characters of a token in an error


def check_same_vocabulary(model: str, own: Tokenizer, draft: str, drafts: Tokenizer) -> None:
    """Raise ConfigInvalid if a draft model has other tokens than the model that it drafts for.

    Sizes may differ: files pad vocabularies at the end. So may special and added tokens, whose texts vary within a
    family: a draft that is wrong costs time, and no token.
    """
    other = first_difference(own.tokens(), drafts.tokens(), special={*own.added_ids(), *drafts.added_ids()})
    if other is not None:
        raise ConfigInvalid(
            f"{draft} cannot draft for {model}: its vocabulary is another one",
            fact=f"{model} has {own.vocab_size} tokens, {draft} has {drafts.vocab_size}; {other}",
            next_step="choose a smaller model of the same family, or leave --draft out",
        )


def first_difference(
    own: Mapping[int, str], drafts: Mapping[int, str], *, special: Collection[int] = frozenset()
) -> str | None:
    """Describe the first id, outside ``special``, with two texts; None if ids mean the same wherever both have one."""
    shared = own.keys() & drafts.keys()
    if not shared - set(special):
        return "they share no token"
    others = (token for token in shared if own[token] != drafts[token] and token not in special)
    token = min(others, default=None)
    if token is None:
        return None
    return f"token {token} is {_shown(own[token])} in one and {_shown(drafts[token])} in the other"


def _shown(text: str) -> str:
    return repr(text[:_MOST_SHOWN])
