"""A model's tokenizer and chat template, read from its local files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgepipe.errors import ModelInvalid
from edgepipe.gateway.text import Detokenizer
from edgepipe.model.config import read_hf_config
from edgepipe.model.gguf_header import read_gguf_header
from edgepipe.model.gguf_tokenizer import special_tokens
from edgepipe.model.template import ChatTemplate, TemplateRenderer, gguf_template, hf_template
from edgepipe.model.tokenizer import Tokenizer


class ModelAssets:
    """``edgepipe.gateway.models.Assets`` over the model room's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._renderer = TemplateRenderer(template)

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
    """Read a model's folder, or its GGUF file. Blocks for some 100 ms. Raises ModelInvalid."""
    gguf = _gguf_file(path)
    if gguf is None:
        tokenizer = Tokenizer.from_file(path / "tokenizer.json", vocab_size=read_hf_config(path).vocab_size)
        return ModelAssets(tokenizer, hf_template(path))
    metadata = read_gguf_header(gguf).metadata
    return ModelAssets(Tokenizer.from_gguf(metadata), gguf_template(metadata, special_tokens(metadata)))


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file to read, or None for a folder in Hugging Face's layout."""
    if path.is_file():
        return path
    if (path / "tokenizer.json").is_file():
        return None
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not found:
        raise ModelInvalid(
            "the model's tokenizer is not here", fact=f"'{path.name}' has neither tokenizer.json nor a GGUF file"
        )
    return found[0]
