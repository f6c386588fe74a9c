"""Chooses the replica for a request, and moves requests on when their replica falls silent. PURE.

A conversation returns to the replica that computed its earlier turns, as long as this replica is not much busier than
the least busy one: its KV cache knows the prompt. Everything else goes to the replica that lacks most of its planned
share of the requests, if it can begin there at once. The memory of prompts holds hashes of their leading blocks, a
bounded number of them, and no text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

BLOCK_TOKENS = 128
MOST_BLOCKS = 1 << 15  # remembered: four million tokens, a few MB
_ENOUGH = 0.5  # share of a prompt's blocks from which on a replica counts as the one that knows it
_BUSIER, _MORE = 1.5, 4.0  # factor and number of requests by which the replica that knows a prompt may be busier

Key = TypeVar("Key", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A replica as this gateway sees it now."""

    works: bool = True  # its engine is ready and reached; else its requests wait
    requests: int = 0  # running and waiting, of all gateways
    waiting: int = 0  # requests among them that its engine has not begun
    free_tokens: int | None = None  # KV tokens that no sequence holds; None: not known
    share: float = 0.0  # planned share of the requests; 0: an equal one


class ReplicaRouter(Generic[Key]):
    """Chooses a replica for each request, and remembers which replica knows which prompts."""

    def __init__(self, *, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        # Replicas that computed a prompt; the key is its hash up to the end of a block. Least recently used first.
        self._known: OrderedDict[bytes, tuple[Key, ...]] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Number of remembered blocks, of all replicas."""
        return len(self._known)

    def choose(self, prompt: Sequence[int], loads: Mapping[Key, ReplicaLoad]) -> Key:
        """Return the replica for a prompt; ``loads`` has one at least."""
        working = {key: load for key, load in loads.items() if load.works} or dict(loads)
        roomy = {key: load for key, load in working.items() if _has_room(load, len(prompt))}
        cost = _costs(working)
        best = min(roomy or working, key=lambda key: (cost[key], key))
        knows = self._longest(prompt, working)
        if knows is None or knows == best:
            return best
        if knows in roomy or not roomy:
            if cost[knows] <= _BUSIER * cost[best] + _MORE:
                return knows
        return best

    def note(self, tokens: Sequence[int], key: Key) -> None:
        """Remember that a replica has computed these tokens."""
        for digest in _digests(tokens):
            others = tuple(other for other in self._known.pop(digest, ()) if other != key)
            self._known[digest] = (*others, key)
        while len(self._known) > self._most_blocks:
            self._known.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forget a replica: its KV cache is lost."""
        for digest, keys in list(self._known.items()):
            if key in keys:
                left = tuple(other for other in keys if other != key)
                if left:
                    self._known[digest] = left
                else:
                    del self._known[digest]

    def _longest(self, prompt: Sequence[int], loads: Mapping[Key, ReplicaLoad]) -> Key | None:
        """Return the replica that knows most of a prompt, the least busy of several; None if none knows enough."""
        longest, found = 0, ()
        for number, digest in enumerate(_digests(prompt), start=1):
            keys = tuple(key for key in self._known.get(digest, ()) if key in loads)
            if not keys:
                break
            longest, found = number, keys
        if not found or longest < _ENOUGH * (len(prompt) // BLOCK_TOKENS):
            return None
        cost = _costs(loads)
        return min(found, key=lambda key: (cost[key], key))


@dataclass(slots=True)
class _Silence:
    since_s: float


class Outages(Generic[Key]):
    """Replicas that do not work, and since when. A short silence is worth waiting for: their KV caches are kept."""

    def __init__(self, *, patience_s: float) -> None:
        """``patience_s``: silence after which requests move."""
        self._patience_s = patience_s
        self._silent: dict[Key, _Silence] = {}

    def look(self, key: Key, *, works: bool, now_s: float) -> None:
        """Note whether a replica works."""
        if works:
            self._silent.pop(key, None)
        else:
            self._silent.setdefault(key, _Silence(now_s))

    def forget(self, key: Key) -> None:
        """Forget a replica that is gone."""
        self._silent.pop(key, None)

    def lost(self, now_s: float) -> list[Key]:
        """Return the replicas whose requests move now."""
        return [key for key, silence in self._silent.items() if now_s >= silence.since_s + self._patience_s]

    def next_s(self, now_s: float) -> float | None:
        """Return when ``lost`` returns one more replica; None without such a time."""
        ends = [silence.since_s + self._patience_s for silence in self._silent.values()]
        return min((end for end in ends if end > now_s), default=None)


def _has_room(load: ReplicaLoad, num_tokens: int) -> bool:
    """Return whether a prompt could begin at once."""
    return not load.waiting and (load.free_tokens is None or load.free_tokens >= num_tokens)


def _costs(loads: Mapping[Key, ReplicaLoad]) -> dict[Key, float]:
    """Return the number of requests of each replica, in terms of one with an equal share."""
    planned = all(load.share > 0.0 for load in loads.values())
    mean = sum(load.share for load in loads.values()) / len(loads) if planned else 1.0
    return {key: load.requests * (mean / load.share if planned else 1.0) for key, load in loads.items()}


def _digests(tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield a hash of the tokens up to the end of each full block."""
    whole = blake2b(digest_size=8)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        whole.update(array("I", tokens[end - BLOCK_TOKENS : end]).tobytes())
        yield whole.copy().digest()
