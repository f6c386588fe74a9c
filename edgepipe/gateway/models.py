"""Models that this gateway can answer for, from the daemon's view, with their tokenizers and templates."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from edgepipe.errors import CapacityError, ModelUnknown
from edgepipe.gateway.engine_link import EngineLink
from edgepipe.gateway.engine_types import Ring, RoutedModel
from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.model_facts import ModelFacts, read_facts
from edgepipe.gateway.text import Detokenizer
from edgepipe.spec.names import canonical_name
from edgepipe.store.typed_names import meant_names
from edgepipe.text.conversations.traits import ModelTraits

_MOST_RINGS = 16  # remembered rings of a model: an answer that saw more names the newest


class Assets(Protocol):
    """Tokenizer and chat template of a model."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids: they go from 0 to one below it."""
        ...

    @property
    def sampling(self) -> Mapping[str, float]:
        """Default sampling parameters of the model, by the names of a request's fields."""
        ...

    @property
    def traits(self) -> ModelTraits:
        """What the chat templates accept."""
        ...

    @property
    def chat(self) -> ChatFormat:
        """Format of calls and reasoning in the model's answers."""
        ...

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Tokenise a text. ``special_tokens``: add the special tokens that the model expects around a raw prompt."""
        ...

    async def encode_long(self, text: str, *, special_tokens: bool, at_most: int, owner: str) -> tuple[int, list[int]]:
        """Tokenise a long text in its owner's turn, without blocking the event loop.

        Return the number of ids, and the ids if they are at most ``at_most``. Raises CapacityError, ModelInvalid.
        """
        ...

    def new_decoder(self) -> Detokenizer:
        """Make a detokenizer for a text of its own, special tokens included."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; empty for special tokens and ids without bytes."""
        ...

    def token_text(self, token: int) -> str:
        """Return the text of a single token for people: special tokens by name, incomplete characters replaced."""
        ...

    def new_detokenizer(self, *, keep: Collection[str] = (), before: Sequence[int] = ()) -> Detokenizer:
        """Make a detokenizer for one choice.

        ``keep``: special tokens that have text. ``before``: tokens whose text the choice continues; without them it
        begins a text.
        """
        ...

    def info(self) -> dict[str, Any]:
        """Return facts about the tokenizer for clients."""
        ...

    async def render(self, messages: Sequence[Mapping[str, Any]], *, owner: str, **keywords: Any) -> str:
        """Render the conversation as a prompt for the assistant's next turn, in its owner's turn.

        Raises TemplateFailed, QueueFull.
        """
        ...

    async def close(self) -> None:
        """Free the resources of rendering."""
        ...


AssetLoader = Callable[[Path], Assets]  # blocking; runs in a thread


@dataclass(frozen=True, slots=True)
class News:
    """News of a model for the comments in clients' streams."""

    recovering: bool = False
    text: str = ""  # ``macbook asleep since 21:14; continuing on 2 machines``
    reading: str = ""  # ``60 %`` of a long prompt; empty once all of it is computed


class ModelEntry:
    """One served model with its link and, after the first request, its assets."""

    def __init__(self, served: RoutedModel, link: EngineLink, load: AssetLoader) -> None:
        self.served = served
        self.num_rings = 0  # rings that have computed answers so far
        self._rings: deque[Ring] = deque(maxlen=_MOST_RINGS)  # the newest of them
        self.update(served)
        self.news = News()
        self.link = link
        self._load = load
        self._assets: Assets | None = None
        self._facts: ModelFacts | None = None
        self._loading = asyncio.Lock()

    def update(self, served: RoutedModel) -> None:
        """Take the engine's newest report."""
        self.served = served
        if served.ring is not None and (not self._rings or self._rings[-1] != served.ring):
            self._rings.append(served.ring)
            self.num_rings += 1

    def rings_since(self, num_rings: int) -> Sequence[Ring]:
        """Return the rings since there were ``num_rings``, that one included; the newest ``_MOST_RINGS`` at most."""
        return list(self._rings)[-(self.num_rings - num_rings + 1) :]

    async def assets(self) -> Assets:
        """Return tokenizer and template, read once. Raises ModelInvalid."""
        async with self._loading:
            if self._assets is None:
                self._assets = await asyncio.to_thread(self._load, Path(self.served.model_path))
            return self._assets

    async def facts(self) -> ModelFacts:
        """Return the facts about the model's files, read once."""
        if self._facts is None:
            self._facts = await asyncio.to_thread(read_facts, Path(self.served.model_path))
        return self._facts

    async def close(self) -> None:
        """Free the assets."""
        async with self._loading:
            if self._assets is not None:
                await self._assets.close()
                self._assets = None


class ModelTable:
    """Served models by name. The daemon's newest view replaces the table."""

    def __init__(self, *, wall_s: Callable[[], float] = time.time) -> None:
        """``wall_s``: seconds since 1970 by this machine's clock."""
        self._wall_s = wall_s
        self._entries: dict[str, ModelEntry] = {}
        self._known: list[RoutedModel] = []
        self._changed = asyncio.Event()

    def replace(self, entries: Sequence[ModelEntry], known: Sequence[RoutedModel]) -> None:
        """Set the ready entries, and all models that the cluster serves or is loading."""
        self._entries = {entry.served.name: entry for entry in entries}
        self._known = list(known)
        self.notify()

    def notify(self) -> None:
        """Wake the waiters of ``changed``."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    @property
    def served(self) -> list[RoutedModel]:
        """Served models, by name."""
        return [self._entries[name].served for name in sorted(self._entries)]

    @property
    def entries(self) -> list[ModelEntry]:
        """Entries of the served models, by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    @property
    def listed(self) -> list[tuple[RoutedModel, ModelEntry]]:
        """Served models, by name, each with its entry, and once more by each of its further names."""
        return [
            (replace(entry.served, name=name), entry)
            for entry in self.entries
            for name in (entry.served.name, *entry.served.names)
        ]

    def get(self, name: str | None) -> ModelEntry:
        """Return the entry of a model; without a name, of the only served model.

        Raises ModelUnknown with the served names, or CapacityError while the model loads.
        """
        if not name and len(self._entries) == 1:
            return next(iter(self._entries.values()))
        name = self.meant(name) if name else name
        if name and name in self._entries:
            return self._entries[name]
        self._raise_if_coming(name)
        names = ", ".join(sorted(self._entries))
        raise ModelUnknown(
            f"the model '{name[:256]}' is not served" if name else "the request names no model",
            fact=f"served: {names}" if names else "no model is served",
            next_step="send one of these names in 'model'" if names else "serve one: edgepipe serve MODEL",
        )

    def meant(self, name: str, loadable: Collection[str] = ()) -> str:
        """Return the name of the model that a request means; ``name`` in canonical form if no model is meant.

        A model's own name goes before further names, so that a further name hides no model. ``loadable``: models on
        disks of the cluster.
        """
        exact = canonical_name(name)
        served = {*self._entries, *(served.name for served in self._known)}
        if exact in served or exact in loadable:
            return exact
        for names in (served, loadable):
            if len(found := meant_names(name, names)) == 1:
                return found[0]
        plain = name.strip().lower().removesuffix(":latest")
        called = {served.name for served in self._known if plain in (own.lower() for own in served.names)}
        return called.pop() if len(called) == 1 else exact

    def is_stopping(self, name: str) -> bool:
        """Return whether the model's engine ends, and none has taken its place."""
        return name not in self._entries and any(
            served.name == name and served.state == "stopping" for served in self._known
        )

    def _raise_if_coming(self, name: str | None) -> None:
        for served in self._known:
            if served.name != name and (name or len(self._known) > 1):
                continue
            if (error := served.refusal(wall_s=self._wall_s())) is not None:
                raise error
            if served.state in ("starting", "loading", "recovering"):
                raise CapacityError(
                    f"the model '{served.name}' is not ready yet",
                    fact=served.message,
                    next_step="try again in a moment",
                )
