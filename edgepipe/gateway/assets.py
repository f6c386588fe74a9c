"""Tokenizer and chat template of a model, read from its local files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.text import TokenDecoder
from edgepipe.store.store import StoredModel
from edgepipe.text.conversations.known_traits import model_traits
from edgepipe.text.conversations.traits import ModelTraits
from edgepipe.text.encoding import LongTextEncoder
from edgepipe.text.template import TemplateRenderer
from edgepipe.text.tokenizer import Tokenizer


class ModelAssets:
    """Implements ``edgepipe.gateway.models.Assets`` with the tokenizer and template of the stored model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: TemplateRenderer,
        long_texts: LongTextEncoder,
        *,
        sampling: Mapping[str, float] | None = None,
        traits: ModelTraits | None = None,
    ) -> None:
        self.sampling = sampling or {}
        self._tokenizer = tokenizer
        self._long_texts = long_texts
        self._renderer = renderer
        self._special = {token: text for text, token in tokenizer.special_ids.items()}
        self._traits = traits or ModelTraits()
        self._chat = detect_format("\n".join(renderer.template.sources.values()))

    @property
    def vocab_size(self) -> int:
        """See Assets."""
        return self._tokenizer.vocab_size

    @property
    def traits(self) -> ModelTraits:
        """See Assets."""
        return self._traits

    @property
    def chat(self) -> ChatFormat:
        """See Assets."""
        return self._chat

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """See Assets."""
        return self._tokenizer.encode(text, add_special=special_tokens)

    async def encode_long(self, text: str, *, special_tokens: bool, at_most: int, owner: str) -> tuple[int, list[int]]:
        """See Assets."""
        return await self._long_texts.encode(text, add_special=special_tokens, at_most=at_most, owner=owner)

    def new_decoder(self) -> TokenDecoder:
        """See Assets."""
        return self._tokenizer.detokenizer(skip_special=False)

    def token_bytes(self, token: int) -> bytes:
        """See Assets."""
        return b"" if token in self._special else self._tokenizer.token_bytes(token)

    def token_text(self, token: int) -> str:
        """See Assets."""
        return self._special.get(token) or self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def new_detokenizer(self, *, keep: Collection[str] = (), before: Sequence[int] = ()) -> TokenDecoder:
        """See Assets. Other special tokens have no text."""
        return self._tokenizer.detokenizer(keep=keep, before=before)

    def info(self) -> dict[str, Any]:
        """See Assets: names as in Hugging Face's ``tokenizer_config.json``."""
        template = self._renderer.template
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": self.vocab_size,
            **template.special_tokens,
            "chat_template": template.sources.get("default"),
        }

    async def render(self, messages: Sequence[Mapping[str, Any]], *, owner: str, **keywords: Any) -> str:
        """See Assets. The first call starts the child process that renders; it stays."""
        return await self._renderer.render(messages, owner=owner, **keywords)

    async def close(self) -> None:
        """End the child processes."""
        await self._renderer.close()
        await self._long_texts.close()


def load_assets(path: Path) -> ModelAssets:
    """Read the files of a model in the store. Raises ModelInvalid.

    Blocks for some 100 ms, and for about 1 s if the template's traits are not known yet.
    """
    model = StoredModel(path.name, path)
    return ModelAssets(
        model.tokenizer(),
        model.template(),
        LongTextEncoder(model.tokenizer_path),
        sampling=model.card.sampling,
        traits=model_traits(path, model.card.template),
    )
