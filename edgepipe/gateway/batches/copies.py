"""Copies of batches on another node: who keeps one, which are kept, and who owns a batch. PURE.

The owner of a batch names one keeper. The keeper reads the record and the files from the owner. All files only grow,
so a copy is a prefix of each. A person may let the keeper take the batch over: it owns the batch in the next *term*.
The owner with the highest term owns the batch; of two in the same term, the one with the smaller node id. Every other
owner gives the batch up as soon as it hears of that one.
"""

from __future__ import annotations

import hashlib
import json
import re
import typing
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgepipe.gateway.batches.records import ENDPOINTS, FINAL, Batch, Status, StoredFile, TokenUsage
from edgepipe.units import format_bytes
from edgepipe.wire.batches import BatchFacts, OwnedBatch
from edgepipe.wire.nodes import ClusterView, MemberState, NodeState

MOST_COPIES = 64  # batches of a node with a copy, and copies that a node keeps: facts of both travel with its state
MOST_RECORD_BYTES = 256 << 10  # 16 texts of metadata and 10 errors take some 20 KB
_MOST_CHARS = 4096  # bound on a text in a record
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_STATUSES: tuple[str, ...] = typing.get_args(Status)
_ROOM_STEP_BYTES = 64 << 20  # a node reports its room in steps, so that its state seldom changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy of a batch on this node. ``sizes``: bytes of input, output and errors that are durable here."""

    owner_node: str  # id of the node that it is copied from
    owner_name: str
    batch: Batch  # the owner's newest record; its files may be larger than the copy
    input: StoredFile
    sizes: tuple[int, int, int] = (0, 0, 0)
    updated_s: int = 0
    record: bytes = b""  # bytes that the owner sent

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(self.sizes)

    @property
    def wanted(self) -> tuple[int, int, int]:
        """Bytes of each file at the owner, as its newest record says."""
        return self.input.num_bytes, self.batch.output_bytes, self.batch.error_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the copy has everything that the record counts."""
        return all(have >= want for have, want in zip(self.sizes, self.wanted, strict=True))

    def to_text(self) -> str:
        """Return the copy as JSON for its folder."""
        values = {"owner_node": self.owner_node, "owner_name": self.owner_name, "sizes": self.sizes}
        return json.dumps(values | {"updated_s": self.updated_s, "record": self.record.decode()}, ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> Copy:
        """Read the JSON of ``to_text``. Raises ValueError, KeyError, TypeError."""
        values: dict[str, Any] = json.loads(text)
        record = str(values["record"]).encode()
        batch, file = read_record(record)
        sizes = tuple(int(size) for size in values["sizes"])
        if len(sizes) != 3 or min(sizes) < 0:
            raise ValueError("a copy has three sizes")
        return cls(
            owner_node=str(values["owner_node"]),
            owner_name=str(values["owner_name"]),
            batch=batch,
            input=file,
            sizes=sizes,
            updated_s=int(values["updated_s"]),
            record=record,
        )


def record_of(batch: Batch, file: StoredFile) -> bytes:
    """Return a batch and its input file as JSON for the keeper."""
    return json.dumps({"batch": json.loads(batch.to_text()), "input": asdict(file)}, ensure_ascii=False).encode()


def read_record(record: bytes) -> tuple[Batch, StoredFile]:
    """Read ``record_of`` of another machine, and check all that this one uses. Raises ValueError, KeyError, TypeError.

    Ids become names of files, so they have no other characters than those of this program's ids.
    """
    if len(record) > MOST_RECORD_BYTES:
        raise ValueError("a record is too long")
    values: dict[str, Any] = json.loads(record)
    batch, file = Batch.from_text(json.dumps(values["batch"])), StoredFile(**values["input"])
    ids = (batch.batch_id, batch.input_file, batch.output_file, batch.error_file)
    texts = (batch.owner, batch.completion_window, batch.model, batch.handed_to, file.owner, file.filename)
    more = (*batch.keepers, *batch.metadata, *batch.metadata.values(), *batch.entered_s)
    numbers = (batch.created_s, batch.expires_s, batch.kept_s, batch.num_lines, batch.completed, batch.failed)
    sizes = (batch.output_bytes, batch.error_bytes, file.num_bytes, file.created_s, file.expires_s)
    counts = (*asdict(batch.usage).values(), *batch.entered_s.values(), batch.term)
    if not (
        all(map(_is_id, ids))
        and len(set(ids)) == len(ids)
        and all(map(_is_text, (*texts, *more)))
        and all(map(_is_count, (*numbers, *sizes, *counts)))
        and batch.status in _STATUSES
        and batch.ends_as in FINAL
        and batch.endpoint in ENDPOINTS
        and batch.copies in (1, 2)
        and (file.file_id, file.purpose) == (batch.input_file, "batch")
    ):
        raise ValueError("a record has an invalid value")
    return batch, file


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_CHARS


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def reported_room(room_bytes: int) -> int:
    """Return the room for copies as a node reports it."""
    return max(0, room_bytes) // _ROOM_STEP_BYTES * _ROOM_STEP_BYTES


def others(view: ClusterView) -> Iterator[MemberState]:
    """Yield the machines that this one hears."""
    return (member for member in view.members if not member.self)


def facts_of(view: ClusterView) -> dict[str, tuple[NodeState, BatchFacts]]:
    """Return what the heard machines report of batches, by node id, without those that have not reported yet."""
    return {
        member.node.node_id: (member.node, member.node.batches)
        for member in others(view)
        if member.node.batches is not None
    }


def choose_keeper(batch_id: str, *, current: str, num_bytes: int, view: ClusterView) -> str:
    """Return the node that keeps a batch's copy; empty if none can.

    The present one stays while it is heard. Else rendezvous hashing chooses among the machines with room (Thaler and
    Ravishankar 1998), so the copies of many batches spread. An absent keeper stays if no other can take its place.
    """
    if current and any(member.node.node_id == current for member in others(view)):
        return current
    fit = [
        node_id
        for node_id, (node, facts) in facts_of(view).items()
        if facts.room_bytes >= num_bytes
        and len(facts.held) < MOST_COPIES
        and not (node.draining or node.leaving or node.sleeps_soon)
    ]
    return max(fit, key=lambda node_id: _weight(batch_id, node_id), default=current)


def _weight(batch_id: str, node_id: str) -> bytes:
    return hashlib.blake2b(f"{batch_id}\0{node_id}".encode(), digest_size=16).digest()


def owner_among(
    batch_id: str, view: ClusterView, *, of: Collection[str] | None = None
) -> tuple[NodeState, OwnedBatch] | None:
    """Return the heard machine that owns a batch, this one left out, with its fact; None if none does.

    ``of``: ids of the nodes whose claims count; None: all.
    """
    claims = [
        (node, own)
        for node, facts in facts_of(view).values()
        for own in facts.owned
        if own.batch_id == batch_id and (of is None or node.node_id in of)
    ]
    return min(claims, key=lambda claim: _rank(claim[1].term, claim[0].node_id), default=None)


def superseded_by(batch: Batch, *, own_id: str, view: ClusterView) -> NodeState | None:
    """Return the heard machine that owns a batch of this node by a higher claim; None if this node owns it.

    Only a node that was named as the keeper may have taken the batch over: others only say so.
    """
    claim = owner_among(batch.batch_id, view, of=batch.keepers)
    if claim is None or _rank(claim[1].term, claim[0].node_id) > _rank(batch.term, own_id):
        return None
    return claim[0]


def _rank(term: int, node_id: str) -> tuple[int, str]:
    return -term, node_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """A batch to copy from its owner."""

    batch_id: str
    owner: NodeState
    term: int


def believed(copy: Copy) -> frozenset[str]:
    """Return the nodes that may say what becomes of a copy: its owner, and those that may have taken the batch over."""
    return frozenset((copy.owner_node, *copy.batch.keepers))


def pulls(own_id: str, view: ClusterView, *, held: Iterable[Copy]) -> dict[str, Pull]:
    """Return the batches whose owner names this node as the keeper, by id; at most ``MOST_COPIES``."""
    of = {copy.batch.batch_id: believed(copy) for copy in held}
    found: dict[str, Pull] = {}
    for _, facts in facts_of(view).values():
        for own in facts.owned:
            claim = owner_among(own.batch_id, view, of=of.get(own.batch_id))
            if own.keeper == own_id and claim is not None and claim[1] == own and len(found) < MOST_COPIES:
                found[own.batch_id] = Pull(batch_id=own.batch_id, owner=claim[0], term=own.term)
    return found


def is_needed(copy: Copy, *, own_id: str, view: ClusterView, now_s: int) -> bool:
    """Return whether a copy stays: its owner wants it here, or no owner of the batch is heard, for a limited time."""
    claim = owner_among(copy.batch.batch_id, view, of=believed(copy))
    if claim is not None:
        return claim[1].keeper == own_id
    return copy.owner_node not in facts_of(view) and now_s < copy.updated_s + copy.batch.kept_s


def may_run(batch: Batch, *, view: ClusterView, waited: bool) -> bool:
    """Return whether a batch that an earlier gateway left may go on: its keeper may have taken it over meanwhile.

    ``waited``: the keeper had its time to answer.
    """
    return waited or not (batch.wants_copy and batch.keeper) or batch.keeper in facts_of(view)


def copy_text(batch: Batch, *, num_bytes: int, view: ClusterView) -> str:
    """Say where a batch's copy is, and how far behind; empty if it wants none."""
    if not batch.wants_copy:
        return ""
    if not batch.keeper:
        why = "all are full or busy" if any(others(view)) else "no other machine is in the cluster"
        return f"no other machine holds a copy: {why}"
    names: dict[str, str] = {member.node.node_id: member.node.name for member in others(view)}
    absent: dict[str, str] = {node.node_id: node.name for node in view.absent}
    name = names.get(batch.keeper) or absent.get(batch.keeper) or batch.keeper[:12]
    if batch.keeper not in names:
        return f"machine {name} holds a copy, but does not answer"
    reported = next((facts for key, (_, facts) in facts_of(view).items() if key == batch.keeper), None)
    held = {held.batch_id: held for held in reported.held} if reported is not None else {}
    have = held.get(batch.batch_id)
    if have is None:
        return f"machine {name} begins a copy of {format_bytes(num_bytes)}"
    behind = num_bytes - have.num_bytes
    return f"machine {name} holds a copy" + (f", {format_bytes(behind)} behind" if behind > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of the whole entries of a copy's files."""

    completed: int = 0
    failed: int = 0
    usage: TokenUsage
    output_bytes: int = 0
    error_bytes: int = 0


def resumed(copy: Copy, tally: Tally, *, now_s: int) -> Batch:
    """Return the batch as its keeper goes on with it.

    A batch that had ended stays so if the copy has all its results. Otherwise the lines without a result run, unless it
    was cancelled or its time was over.
    """
    batch = copy.batch
    lacks = tally.completed + tally.failed < batch.completed + batch.failed
    status = batch.status
    if status in ("finalizing", "completed", "expired") and lacks:
        status = "finalizing" if batch.ends_as == "expired" else "in_progress"
    return replace(
        batch,
        status=status,
        entered_s=batch.entered_s if status == batch.status else {**batch.entered_s, status: now_s},
        completed=tally.completed,
        failed=tally.failed,
        usage=tally.usage,
        output_bytes=tally.output_bytes,
        error_bytes=tally.error_bytes,
        keeper="",
        term=batch.term + 1,
        handed_to="",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUsers:
    """The users that this node's gateway knows."""

    machine: str = "address:127.0.0.1"  # identity of this machine's command line
    known: frozenset[str] = frozenset({"address:127.0.0.1"})

    def may_take(self, user: str, batch: Batch) -> bool:
        """Return whether a user may take a batch over: its own, or any as this machine's own user."""
        return user in (batch.owner, self.machine)

    def owner_here(self, batch: Batch, user: str) -> str:
        """Return who sees a batch after ``user`` took it over: as before, if that user exists on this node."""
        return batch.owner if batch.owner in self.known else user


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Reason why this node does not take a batch over, in the three parts of an error."""

    what: str
    fact: str
    next_step: str


def refusal(batch_id: str, copy: Copy | None, *, owns: bool, listened: bool, view: ClusterView) -> Refusal | None:
    """Return why a batch is not taken over here; None if it may be.

    owns      this node owns the batch already
    listened  this node has heard the cluster for long enough to miss the owner
    """
    if owns:
        return Refusal(
            what=f"this machine owns {batch_id} already",
            fact="it runs here, or has ended here",
            next_step=f"edgepipe batch show {batch_id}",
        )
    if (claim := owner_among(batch_id, view)) is not None:
        return _alive(batch_id, claim[0].name)
    if copy is None:
        return _elsewhere(batch_id, view)
    if not listened:
        return Refusal(
            what=f"this machine cannot know yet whether machine {copy.owner_name} is lost",
            fact="it has listened to the cluster for a few seconds only",
            next_step=f"in ten seconds: edgepipe batch take-over {batch_id}",
        )
    if any(member.node.node_id == copy.owner_node for member in others(view)):
        return _alive(batch_id, copy.owner_name)
    hearing = [node.name for node, facts in facts_of(view).values() if copy.owner_node in facts.owners]
    if hearing:
        return Refusal(
            what=f"machine {copy.owner_name}, which owns {batch_id}, is not lost",
            fact=f"machine {hearing[0]} hears it, this one does not",
            next_step=f"edgepipe doctor --peer {copy.owner_name}",
        )
    if copy.sizes[0] < copy.input.num_bytes:
        have, want = format_bytes(copy.sizes[0]), format_bytes(copy.input.num_bytes)
        anew = "edgepipe batch run IN.jsonl -o OUT.jsonl"
        return Refusal(
            what=f"the copy of {batch_id} is not complete",
            fact=f"it has {have} of the {want} of its input",
            next_step=f"start machine {copy.owner_name} again, or run the file anew: {anew}",
        )
    return None


def _alive(batch_id: str, name: str) -> Refusal:
    return Refusal(
        what=f"{batch_id} cannot be taken over: the machine that owns it is alive",
        fact=f"machine {name} answers",
        next_step=f"on {name}: edgepipe batch show {batch_id}",
    )


def _elsewhere(batch_id: str, view: ClusterView) -> Refusal:
    holders = [node.name for node, facts in facts_of(view).values() for held in facts.held if held.batch_id == batch_id]
    if holders:
        return Refusal(
            what=f"this machine holds no copy of {batch_id}",
            fact=f"machine {holders[0]} does",
            next_step=f"on {holders[0]}: edgepipe batch take-over {batch_id}",
        )
    return Refusal(
        what=f"no machine that answers holds a copy of {batch_id}",
        fact=f"{1 + sum(1 for _ in others(view))} machines were asked",
        next_step="start the machine that owns it, or the one with the copy: edgepipe status",
    )


def first_to_copy(owned: Iterable[Batch]) -> list[Batch]:
    """Choose the batches that may have a copy: unfinished ones first, then the newest."""
    order = sorted(owned, key=lambda batch: (batch.is_final, -batch.created_s, batch.batch_id))
    return order[:MOST_COPIES]
