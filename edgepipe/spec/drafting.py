"""How a model drafts: with a layer of its own, or as a second model beside another one's head. For people, too."""

from __future__ import annotations

from edgepipe.errors import ConfigInvalid
from edgepipe.spec.facts import ModelConfig

DRAFT_WAYS = ("auto", "lookup", "mtp", "off")
"""Values of ``--draft`` that name no model."""

_MOST_KV_TOKENS = 16_384  # KV of a draft model: drafts pay for one chat or two; longer chats get theirs from a lookup


def draft_way(text: str) -> str:
    """Return what ``--draft`` asks for: one of ``DRAFT_WAYS`` ("auto" for an empty text), or "model"."""
    return (text or "auto") if (text or "auto") in DRAFT_WAYS else "model"


def drafting(config: ModelConfig, model: str) -> ModelConfig:
    """Return the config with the layer that predicts one token more. Raises ConfigInvalid if the model has none."""
    if config.mtp is None:
        raise ConfigInvalid(
            f"{model} cannot draft with a layer of its own (--draft mtp)",
            fact="its files hold no such layer, or not all of its tensors",
            next_step="leave --draft out, or pull the model again: older versions of edgepipe did not note this layer",
        )
    return config.with_mtp()


def draft_kv_tokens(config: ModelConfig) -> int:
    """Return the tokens of a draft model's KV cache: two conversations, up to 16,384 tokens."""
    return min(2 * config.context_length, _MOST_KV_TOKENS)


def check_can_draft(config: ModelConfig, model: str) -> None:
    """Raise ConfigInvalid if a model cannot be a draft model."""
    if config.state_bytes():
        raise ConfigInvalid(
            f"{model} cannot be a draft model",
            fact="it has recurrent layers, whose states do not go back to an earlier token",
            next_step="choose a small model without recurrent layers, or leave --draft out",
        )
