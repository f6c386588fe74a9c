"""What this node keeps of models on another node's word, and how much of it: no I/O.

A node that announces an engine makes every other node fetch the model's card and tokenizer, unasked. So each node's
word has bounds: it fills so much of the disk, one fetch runs at a time, and the next one waits. What has tensors, or
what this node's user asked for, does not count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from edgepipe.errors import ModelDownloadFailed
from edgepipe.units import format_bytes

MAX_MODELS_PER_NODE = 8  # adopted on one node's word; a home machine has one or two engines
MAX_BYTES_PER_NODE = 256 << 20  # of them together; a model takes 2 to 40 MB
MAX_ANNOUNCED = 64  # engines of one node that are considered
MAX_FETCHES = 4  # unasked, under way at a time, each for another node
ADOPTED_BYTES_PER_S = 4 << 20  # of one node, on average: the next fetch waits so long
RETRY_S = 30.0  # after a fetch that failed, before the next one for that node
FORGET_S = 24 * 3600.0  # a model whose engine is gone for so long is deleted

_MAX_REMEMBERED = 256  # models that were tried, problems that were told

T = TypeVar("T")


class ModelKey(NamedTuple):
    """A model's content under a name."""

    model: str
    manifest_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A model that is here on a node's word, without tensors."""

    key: ModelKey
    node_id: str
    num_bytes: int
    since_s: float  # wall clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model to fetch next on a node's word."""

    key: ModelKey
    node_id: str


class Adoptions:
    """Decides what is fetched next, what must go for it, and what is refused."""

    def __init__(self) -> None:
        self._held: tuple[Adopted, ...] = ()
        self._announced: Mapping[str, Sequence[ModelKey]] = {}
        self._busy: set[str] = set()  # nodes on whose word something is fetched, or was until now
        self._coming: list[tuple[str, int]] = []  # node and bytes of what is not on the disk yet
        self._tried: OrderedDict[ModelKey, None] = OrderedDict()  # the last one at the end
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._seen_s: dict[ModelKey, float] = {}  # of what is held: when its engine was last announced

    def note_held(self, held: Sequence[Adopted]) -> None:
        """What is on the disk now."""
        self._held = tuple(held)

    def note_announced(self, announced: Mapping[str, Sequence[ModelKey]]) -> None:
        """The engines' models by node."""
        self._announced = {node_id: keys[:MAX_ANNOUNCED] for node_id, keys in announced.items()}

    def due(self, here: Container[ModelKey]) -> list[Wanted]:
        """Take what is to be fetched now: at most one model per node, those first that were not tried yet."""
        order = {key: index for index, key in enumerate(self._tried)}
        found: list[Wanted] = []
        for node_id, keys in self._announced.items():
            missing = [key for key in keys if key not in here]
            if missing and node_id not in self._busy:
                found.append(Wanted(key=min(missing, key=lambda key: order.get(key, -1)), node_id=node_id))
        for wanted in found:
            self._busy.add(wanted.node_id)
            _remember(self._tried, wanted.key)
        return found

    def rest_s(self, wanted: Wanted, here: Container[ModelKey]) -> float:
        """How long to wait before the node's next model, once ``note_held`` was told what came."""
        if wanted.key not in here:
            return RETRY_S
        return sum(one.num_bytes for one in self._held if one.key == wanted.key) / ADOPTED_BYTES_PER_S

    def tell(self, node_id: str, problem: str) -> bool:
        """Whether a problem with a node's models is new; each is told once."""
        first = (node_id, problem) not in self._told
        _remember(self._told, (node_id, problem))
        return first

    def done(self, wanted: Wanted) -> None:
        """Its node's next model may be fetched."""
        self._busy.discard(wanted.node_id)

    @contextmanager
    def coming(self, node_id: str, num_bytes: int) -> Generator[list[Adopted]]:
        """Reserve room for a model on a node's word while the block runs; yields what must be deleted for it.

        Oldest first, and nothing whose engine is announced. Raises ModelDownloadFailed if there is no room.
        """
        drop = self._make_room(node_id, num_bytes)
        entry = (node_id, num_bytes)
        self._coming.append(entry)
        try:
            yield drop
        finally:
            self._coming.remove(entry)

    def forgotten(self, *, now_s: float) -> list[Adopted]:
        """What is held though its engine is gone for long; ``now_s``: monotonic."""
        announced = self._announced_keys()
        self._seen_s = {
            one.key: now_s if one.key in announced else self._seen_s.get(one.key, now_s) for one in self._held
        }
        return [one for one in self._held if now_s - self._seen_s[one.key] > FORGET_S]

    def _make_room(self, node_id: str, num_bytes: int) -> list[Adopted]:
        kept = sorted((one for one in self._held if one.node_id == node_id), key=lambda one: one.since_s)
        coming = [size for node, size in self._coming if node == node_id]
        announced, drop = self._announced_keys(), list[Adopted]()
        while len(kept) + len(coming) >= MAX_MODELS_PER_NODE or (
            sum(one.num_bytes for one in kept) + sum(coming) + num_bytes > MAX_BYTES_PER_NODE
        ):
            oldest = next((one for one in kept if one.key not in announced), None)
            if oldest is None:
                raise ModelDownloadFailed(
                    "a node announces more models than are kept on its word",
                    fact=f"at most {MAX_MODELS_PER_NODE} models and {format_bytes(MAX_BYTES_PER_NODE)} are",
                    next_step="edgepipe models pull NAME, for a model that this node shall answer for",
                )
            kept.remove(oldest)
            drop.append(oldest)
        return drop

    def _announced_keys(self) -> Collection[ModelKey]:
        return {key for keys in self._announced.values() for key in keys}


def _remember(known: OrderedDict[T, None], one: T) -> None:
    known[one] = None
    known.move_to_end(one)
    while len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)
