"""The models that this gateway can answer for: what the daemon tells, and their tokenizers and templates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgepipe.errors import CapacityError, ModelUnknown
from edgepipe.gateway.engine_link import EngineLink
from edgepipe.gateway.engine_types import ServedModel
from edgepipe.gateway.text import Detokenizer
from edgepipe.gateway.tool_calls import ToolFormat


class Assets(Protocol):
    """What turns a model's text into ids and back."""

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to one below this."""
        ...

    @property
    def sampling(self) -> Mapping[str, float]:
        """How the model's tokens are drawn where a request does not say, by the names of its fields."""
        ...

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        ...

    @property
    def template_knows_tools(self) -> bool:
        """Whether its chat template shows tools to the model."""
        ...

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Ids of a text. ``special_tokens``: add those that the model expects around a raw prompt."""
        ...

    async def encode_long(self, text: str, *, special_tokens: bool, at_most: int) -> tuple[int, list[int]]:
        """The number of a long text's ids, and the ids if there are not more than ``at_most``; the loop goes on
        meanwhile. Raises CapacityError, ModelInvalid."""
        ...

    def decode(self, ids: Sequence[int], *, finish: bool = True) -> str:
        """The text of ids, special tokens' too. ``finish`` False: without a character that is incomplete at the end."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; empty for special tokens and ids that have none."""
        ...

    def token_text(self, token: int) -> str:
        """A token by itself, for people: special ones by their name, half characters replaced."""
        ...

    def new_detokenizer(self, *, tool_calls: bool = False, before: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for one choice. ``tool_calls``: what begins a call has text, even where it is special.
        ``before``: tokens whose text the choice continues; without them it begins a text."""
        ...

    def info(self) -> dict[str, Any]:
        """What clients may want to know of the tokenizer."""
        ...

    async def render(self, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> str:
        """The conversation as a prompt that asks for the assistant's next turn. Raises TemplateFailed."""
        ...

    async def close(self) -> None:
        """Give back what rendering holds."""
        ...


AssetLoader = Callable[[Path], Assets]  # blocking; runs in a thread


@dataclass(frozen=True, slots=True)
class News:
    """What clients may be told beside their answers."""

    recovering: bool = False
    text: str = ""  # ``macbook asleep since 21:14; continuing on 2 machines``
    reading: str = ""  # ``60 %`` of a prompt that takes long; empty when it is read


class ModelEntry:
    """One served model with its link and, once somebody needed them, its assets."""

    def __init__(self, served: ServedModel, link: EngineLink, load: AssetLoader) -> None:
        self.served = served
        self.news = News()
        self.link = link
        self._load = load
        self._assets: Assets | None = None
        self._loading = asyncio.Lock()

    async def assets(self) -> Assets:
        """Tokenizer and template, read once. Raises ModelInvalid."""
        async with self._loading:
            if self._assets is None:
                self._assets = await asyncio.to_thread(self._load, Path(self.served.model_path))
            return self._assets

    async def close(self) -> None:
        """Give the assets back."""
        async with self._loading:
            if self._assets is not None:
                await self._assets.close()
                self._assets = None


class ModelTable:
    """Served models by name. The daemon's newest view replaces the table."""

    def __init__(self) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._known: list[ServedModel] = []
        self._changed = asyncio.Event()

    def replace(self, entries: Sequence[ModelEntry], known: Sequence[ServedModel]) -> None:
        """Ready entries, and every model that the cluster works on."""
        self._entries = {entry.served.name: entry for entry in entries}
        self._known = list(known)
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits for ``changed``."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    @property
    def served(self) -> list[ServedModel]:
        """Models that answer now, by name."""
        return [self._entries[name].served for name in sorted(self._entries)]

    def get(self, name: str | None) -> ModelEntry:
        """The entry of a model; no name means the only one served. Raises ModelUnknown, listing what there is, or
        CapacityError while it loads."""
        if not name and len(self._entries) == 1:
            return next(iter(self._entries.values()))
        if name and name in self._entries:
            return self._entries[name]
        self._raise_if_coming(name)
        names = ", ".join(sorted(self._entries))
        raise ModelUnknown(
            f"the model '{name[:256]}' is not served here" if name else "the request names no model",
            fact=f"served: {names}" if names else "no model is served",
            next_step="name one of these in 'model'" if names else "serve one: edgepipe serve MODEL",
        )

    def _raise_if_coming(self, name: str | None) -> None:
        for served in self._known:
            if served.name != name and (name or len(self._known) > 1):
                continue
            if served.error is not None:
                raise served.error
            if served.state in ("starting", "loading"):
                raise CapacityError(
                    f"the model '{served.name}' is not ready yet",
                    fact=served.message,
                    next_step="try again in a moment",
                )
