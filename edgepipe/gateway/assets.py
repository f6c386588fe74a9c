"""A model's tokenizer and chat template, read from its local files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgepipe.gateway.text import Detokenizer
from edgepipe.model.store import StoredModel
from edgepipe.model.template import TemplateRenderer
from edgepipe.model.tokenizer import Tokenizer


class ModelAssets:
    """``edgepipe.gateway.models.Assets`` over the model room's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, renderer: TemplateRenderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """See Assets."""
        return self._tokenizer.encode(text, add_special=special_tokens)

    def new_detokenizer(self) -> Detokenizer:
        """See Assets. Special tokens have no text."""
        return self._tokenizer.detokenizer()

    async def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """See Assets. The child that renders is started by the first call and kept."""
        return await self._renderer.render(messages)

    async def close(self) -> None:
        """End the child."""
        await self._renderer.close()


def load_assets(path: Path) -> ModelAssets:
    """Read the files of a model in the store. Blocks for some 100 ms. Raises ModelInvalid."""
    model = StoredModel(path.name, path)
    return ModelAssets(model.tokenizer(), model.template())
