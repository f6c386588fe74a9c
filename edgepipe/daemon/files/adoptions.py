"""Limits on the models that this node keeps because another node announced them. No I/O.

A node that announces an engine makes every other node fetch the model's card and tokenizer, unasked. So each announcing
node has limits here: a number of models and bytes, one fetch at a time, and a pause after each fetch. Models with
tensors, and models that this node's user asked for, do not count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from edgepipe.errors import ModelDownloadFailed
from edgepipe.units import format_bytes

MAX_MODELS_PER_NODE = 8  # adopted for one announcing node; a home machine has one or two engines
MAX_BYTES_PER_NODE = 256 << 20  # size of these models together; a model takes 2 to 40 MB
MAX_ANNOUNCED = 64  # engines of one node that are considered
MAX_FETCHES = 4  # unasked fetches at the same time, each for another node
ADOPTED_BYTES_PER_S = 4 << 20  # mean rate from one node: sets the pause before its next fetch
RETRY_S = 30.0  # pause of a node after its fetch failed
FORGET_S = 24 * 3600.0  # a model is deleted when its engine is gone for so long

_MAX_REMEMBERED = 256  # tried models; reported problems

T = TypeVar("T")


class ModelKey(NamedTuple):
    """A model's content under a name."""

    model: str
    manifest_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A model on this disk for an announcing node, without tensors."""

    key: ModelKey
    node_id: str
    num_bytes: int
    since_s: float  # wall clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model to fetch next for an announcing node."""

    key: ModelKey
    node_id: str


class Adoptions:
    """Decides which model is fetched next, which models are deleted for it, and which are refused."""

    def __init__(
        self, *, max_models: int = MAX_MODELS_PER_NODE, retry_s: float = RETRY_S, forget_s: float = FORGET_S
    ) -> None:
        self._max_models = max_models  # models adopted for one announcing node
        self._retry_s = retry_s
        self._forget_s = forget_s
        self._held: tuple[Adopted, ...] = ()
        self._announced: Mapping[str, Sequence[ModelKey]] = {}
        self._busy: set[str] = set()  # nodes with a fetch under way, or in the pause after it
        self._coming: list[tuple[str, int]] = []  # node and bytes of models that are not on the disk yet
        self._tried: OrderedDict[ModelKey, None] = OrderedDict()  # the newest at the end
        self._reported: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._seen_s: dict[ModelKey, float] = {}  # time when the engine of a held model was last announced

    def note_held(self, held: Sequence[Adopted]) -> None:
        """Set the adopted models that are on the disk."""
        self._held = tuple(held)

    def note_announced(self, announced: Mapping[str, Sequence[ModelKey]]) -> None:
        """Set the models of the announced engines, by node."""
        self._announced = {node_id: keys[:MAX_ANNOUNCED] for node_id, keys in announced.items()}

    def due(self, present: Container[ModelKey]) -> list[Wanted]:
        """Choose the models to fetch now: at most one per node, untried models first."""
        order = {key: index for index, key in enumerate(self._tried)}
        found: list[Wanted] = []
        for node_id, keys in self._announced.items():
            missing = [key for key in keys if key not in present]
            if missing and node_id not in self._busy:
                found.append(Wanted(key=min(missing, key=lambda key: order.get(key, -1)), node_id=node_id))
        for wanted in found:
            self._busy.add(wanted.node_id)
            _remember(self._tried, wanted.key)
        return found

    def rest_s(self, wanted: Wanted, present: Container[ModelKey]) -> float:
        """Return the pause before the node's next fetch. Call ``note_held`` with the result of this one before."""
        if wanted.key not in present:
            return self._retry_s
        return sum(model.num_bytes for model in self._held if model.key == wanted.key) / ADOPTED_BYTES_PER_S

    def tell(self, node_id: str, problem: str) -> bool:
        """Return whether a problem with a node's models is new: each is reported once."""
        first = (node_id, problem) not in self._reported
        _remember(self._reported, (node_id, problem))
        return first

    def done(self, wanted: Wanted) -> None:
        """End the node's pause: its next model may be fetched."""
        self._busy.discard(wanted.node_id)

    @contextmanager
    def coming(self, node_id: str, num_bytes: int) -> Generator[list[Adopted]]:
        """Reserve room for a node's model while the block runs; yield the models that must be deleted for it.

        The oldest go first; announced models stay. Raises ModelDownloadFailed if there is no room.
        """
        drop = self._make_room(node_id, num_bytes)
        entry = (node_id, num_bytes)
        self._coming.append(entry)
        try:
            yield drop
        finally:
            self._coming.remove(entry)

    def forgotten(self, *, now_s: float) -> list[Adopted]:
        """Return the held models without an announced engine for ``forget_s``; ``now_s``: monotonic."""
        announced = self._announced_keys()
        self._seen_s = {
            model.key: now_s if model.key in announced else self._seen_s.get(model.key, now_s) for model in self._held
        }
        return [model for model in self._held if now_s - self._seen_s[model.key] > self._forget_s]

    def _make_room(self, node_id: str, num_bytes: int) -> list[Adopted]:
        kept = sorted((model for model in self._held if model.node_id == node_id), key=lambda model: model.since_s)
        coming = [size for node, size in self._coming if node == node_id]
        announced, drop = self._announced_keys(), list[Adopted]()
        while len(kept) + len(coming) >= self._max_models or (
            sum(model.num_bytes for model in kept) + sum(coming) + num_bytes > MAX_BYTES_PER_NODE
        ):
            oldest = next((model for model in kept if model.key not in announced), None)
            if oldest is None:
                raise ModelDownloadFailed(
                    "a node announces more models than this node keeps for it",
                    fact=f"at most {self._max_models} models and {format_bytes(MAX_BYTES_PER_NODE)} are kept",
                    next_step="edgepipe models pull NAME, for a model that this node should answer for",
                )
            kept.remove(oldest)
            drop.append(oldest)
        return drop

    def _announced_keys(self) -> Collection[ModelKey]:
        return {key for keys in self._announced.values() for key in keys}


def _remember(known: OrderedDict[T, None], item: T) -> None:
    known[item] = None
    known.move_to_end(item)
    while len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)
