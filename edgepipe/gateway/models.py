"""Models that this gateway can answer for, from the daemon's view, with their tokenizers and templates."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from edgepipe.errors import CapacityError, EdgepipeError, ModelUnknown
from edgepipe.gateway.engine_types import RingMachines, RoutedModel
from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.model_facts import ModelFacts, read_facts
from edgepipe.gateway.replica_links import ReplicaLinks
from edgepipe.gateway.text import TokenDecoder
from edgepipe.ids import PipelineId
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

    def new_decoder(self) -> TokenDecoder:
        """Make a detokenizer for a text of its own, special tokens included."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; empty for special tokens and ids without bytes."""
        ...

    def token_text(self, token: int) -> str:
        """Return the text of a single token for people: special tokens by name, incomplete characters replaced."""
        ...

    def new_detokenizer(self, *, keep: Collection[str] = (), before: Sequence[int] = ()) -> TokenDecoder:
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


@dataclass(slots=True)
class _Pipeline:
    """One pipeline of a model."""

    served: RoutedModel
    news: News = field(default_factory=News)
    away: bool = False  # no engine of it is known
    num_rings: int = 0  # rings that have computed answers so far
    rings: deque[RingMachines] = field(
        default_factory=lambda: deque[RingMachines](maxlen=_MOST_RINGS)
    )  # the newest of them

    def update(self, served: RoutedModel) -> None:
        self.served = served
        if served.ring is not None and (not self.rings or self.rings[-1] != served.ring):
            self.rings.append(served.ring)
            self.num_rings += 1

    def rings_since(self, num_rings: int) -> Sequence[RingMachines]:
        return list(self.rings)[-(self.num_rings - num_rings + 1) :]


class ModelEntry:
    """One served model with the links to its pipelines and, after the first request, its assets."""

    def __init__(self, link: ReplicaLinks, load: AssetLoader) -> None:
        self.link = link
        self._pipelines: dict[PipelineId, _Pipeline] = {}
        self._served: RoutedModel | None = None
        self._load = load
        self._assets: Assets | None = None
        self._facts: ModelFacts | None = None
        self._loading = asyncio.Lock()
        self._closed = False

    @property
    def served(self) -> RoutedModel:
        """The model as requests see it: of several pipelines, one that is ready, with the sums of all."""
        assert self._served is not None, "an entry has a pipeline"
        return self._served

    @property
    def pipelines(self) -> Collection[PipelineId]:
        """The model's pipelines."""
        return self._pipelines.keys()

    def update(self, served: RoutedModel, news: News) -> None:
        """Take an engine's newest report."""
        key = served.pipeline_id
        if key not in self._pipelines:
            self._pipelines[key] = _Pipeline(served)
        self._pipelines[key].update(served)
        self._pipelines[key].news, self._pipelines[key].away = news, False
        self._served = _together(list(self._pipelines.values()))

    def tell(self, key: PipelineId, news: News) -> None:
        """Set the news of a pipeline without an engine."""
        self._pipelines[key].news, self._pipelines[key].away = news, True
        self._served = _together(list(self._pipelines.values()))

    def remove(self, key: PipelineId) -> None:
        """Forget a pipeline."""
        if len(self._pipelines) > 1:
            del self._pipelines[key]
            self._served = _together(list(self._pipelines.values()))

    def served_by(self, key: PipelineId) -> RoutedModel:
        """Return the newest report of a pipeline."""
        return self._pipelines[key].served

    def news(self, pipelines: Sequence[PipelineId]) -> News:
        """Return the news for a request that these pipelines compute, the present one last."""
        found = self._pipelines.get(pipelines[-1]) if pipelines else None
        return (found or next(iter(self._pipelines.values()))).news

    def num_rings(self) -> Mapping[PipelineId, int]:
        """Return the number of rings of each pipeline so far."""
        return {key: each.num_rings for key, each in self._pipelines.items()}

    def rings_since(
        self, num_rings: Mapping[PipelineId, int], pipelines: Sequence[PipelineId]
    ) -> Sequence[RingMachines]:
        """Return the rings of pipelines since there were ``num_rings``, that one included; at most ``_MOST_RINGS`` of
        each pipeline. Without pipelines: those that may compute the answer."""
        known = [key for key in dict.fromkeys(pipelines or self._pipelines) if key in self._pipelines]
        return [ring for key in known for ring in self._pipelines[key].rings_since(num_rings.get(key, 1))]

    async def assets(self) -> Assets:
        """Return tokenizer and template, read once. Raises ModelInvalid."""
        async with self._loading:
            if self._assets is None:
                self._assets = await asyncio.to_thread(self._load, Path(self.served.model_path))
                if self._closed:  # the request is older than the end of its model
                    await self._assets.close()
            return self._assets

    async def facts(self) -> ModelFacts:
        """Return the facts about the model's files, read once."""
        if self._facts is None:
            self._facts = await asyncio.to_thread(read_facts, Path(self.served.model_path))
        return self._facts

    async def close(self) -> None:
        """End the child processes of the assets. Calls of the assets that need one fail from now on."""
        self._closed = True
        async with self._loading:
            if self._assets is not None:
                await self._assets.close()


def _together(pipelines: Sequence[_Pipeline]) -> RoutedModel:
    """Return a model as requests see it, from the reports of its pipelines."""
    present = [each.served for each in pipelines if not each.away] or [each.served for each in pipelines]
    first = min(present, key=lambda served: (served.state != "ready", served.replica))
    if len(pipelines) == 1:
        return first
    return replace(
        first,
        context_length=min(each.served.context_length for each in pipelines),
        weight_bytes=sum(served.weight_bytes for served in present),
        num_requests=sum(served.num_requests for served in present),
        num_steps=sum(served.num_steps for served in present),
        num_engines=max(1, sum(served.state == "ready" for served in present)),
    )


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

    def num_engines(self, name: str) -> int:
        """Return how many pipelines answer for a model; 1 while it is not served."""
        try:
            return self.get(name or None).served.num_engines
        except EdgepipeError:
            return 1

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
