"""Copies of batches: who keeps one, what is read next, and what a take-over makes of a copy that was cut anywhere."""

from __future__ import annotations

import json
import random
import shutil
import stat
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.daemon.files import batch_sources as sources_module
from edgepipe.daemon.files.batch_sources import BatchSources
from edgepipe.errors import AccessDenied, RemoteProtocolError, RequestInvalid
from edgepipe.gateway.access import AccessRules, local_users
from edgepipe.gateway.batches import copies
from edgepipe.gateway.batches.copies import Copy
from edgepipe.gateway.batches.lines import Outcome, Place, answer_entry, error_entry
from edgepipe.gateway.batches.records import Batch, CheckedInput, StoredFile, TokenUsage
from edgepipe.gateway.batches.store import FilesSettings, Store
from edgepipe.gateway.batches.take_over import TakeOver
from edgepipe.ids import NodeId
from edgepipe.wire.batches import (
    BatchFacts,
    BatchPart,
    BatchReport,
    BatchSource,
    HeldBatch,
    OwnedBatch,
    ReadBatchRequest,
    digest_of,
)
from edgepipe.wire.nodes import ClusterView, MemberState, NodeState
from tests.support.daemon.published_state import FakeState

NOW_S, DAY_S = 1_000_000, 24 * 3600
ROOM = 1 << 30
BATCH = "batch_1"


def opened(folder: Path) -> Store:
    return Store(FilesSettings(folder=folder, least_free_bytes=0))


def begun(store: Store, num_lines: int, **fields: Any) -> Batch:
    """A batch that computes, with some empty lines in its input."""
    data = b"".join(b'{"custom_id": "c%d"}\n' % number + b"\n" * (number % 3 == 0) for number in range(num_lines))
    upload = store.new_upload("file-in")
    upload.write(data)
    file = StoredFile(
        file_id="file-in",
        owner="a",
        num_bytes=len(data),
        created_s=NOW_S,
        expires_s=NOW_S + DAY_S,
        filename="in.jsonl",
        purpose="batch",
    )
    store.keep(upload, file)
    wanted: dict[str, Any] = {
        "batch_id": BATCH,
        "owner": "a",
        "endpoint": "/v1/completions",
        "input_file": "file-in",
        "completion_window": "24h",
        "created_s": NOW_S,
        "expires_s": NOW_S + DAY_S,
        "output_file": "file-out",
        "error_file": "file-err",
        "kept_s": 30 * DAY_S,
        "copies": 2,
        "keeper": "k",
    }
    batch = Batch(**(wanted | fields))
    store.add_batch(batch)
    return store.checked(batch, CheckedInput(num_lines=num_lines), now_s=NOW_S)


def answered(number: int) -> Outcome:
    """The result of a line: every third one failed."""
    entry_id, custom_id = f"batch_req_1_{number}", f"c{number}"
    if number % 3 == 0:
        entry = error_entry(entry_id=entry_id, custom_id=custom_id, number=number, code="x", message="m")
        return Outcome(number=number, entry=entry, succeeded=False)
    usage = {"prompt_tokens": number, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    body = json.dumps({"text": "x" * (number * 13 % 50), "usage": usage}).encode()
    return Outcome(
        number=number,
        entry=answer_entry(entry_id=entry_id, custom_id=custom_id, status=200, request_id="r", body=body),
        succeeded=True,
        usage=TokenUsage(prompt=number, cached=2, completion=7),
    )


def unfinished(store: Store, batch: Batch) -> list[int]:
    """The lines that have no result yet."""
    place, numbers = Place(), list[int]()
    while True:
        lines, after = store.next_lines(batch, place)
        if after == place:
            return numbers
        numbers += [line.number for line in lines]
        place = after


def recorded(path: Path, size: int) -> list[int]:
    """The lines with an entry in a file."""
    text = path.read_bytes()[:size] if size else b""
    return [int(json.loads(entry)["id"].rpartition("_")[2]) for entry in text.splitlines()]


def source_of(store: Store, batch: Batch) -> BatchSource:
    made = store.record_for_keeper(batch)
    assert made is not None
    return BatchSource(
        batch_id=batch.batch_id,
        keeper="k",
        record=made[0],
        files=(batch.input_file, batch.output_file, batch.error_file),
        num_bytes=(made[1], batch.output_bytes, batch.error_bytes),
    )


def asked(copy: Copy | None) -> ReadBatchRequest:
    sizes = copy.sizes if copy is not None else (0, 0, 0)
    have = digest_of(copy.record) if copy is not None else b""
    return ReadBatchRequest(batch_id=BATCH, input_at=sizes[0], output_at=sizes[1], error_at=sizes[2], have=have)


def taken(keeper: Store, parts: Sequence[BatchPart]) -> Copy:
    """The copy once parts have come."""
    copy = keeper.copies.find(BATCH)
    for part in parts:
        if part.record:
            copy = keeper.copies.begin(part.record, batch_id=BATCH, owner_node="o", owner_name="owner", now_s=NOW_S)
        else:
            assert copy is not None, "the record comes first"
            copy = keeper.copies.append(copy, part)
    assert copy is not None
    keeper.copies.keep(copy)
    return copy


@dataclass
class Owner:
    """A machine with a batch, read by its keeper."""

    folder: Path
    num_lines: int = 40
    left: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.store = opened(self.folder)
        self.batch = begun(self.store, self.num_lines)
        self.left = unfinished(self.store, self.batch)
        self.sources = BatchSources(self.folder / "files", local=FakeState())

    def works(self, rng: random.Random) -> None:
        """Some lines get their result."""
        group = [self.left.pop(rng.randrange(len(self.left))) for _ in range(min(len(self.left), rng.randrange(6)))]
        if group:
            self.batch = self.store.record(BATCH, [answered(number) for number in group])

    async def parts(self, copy: Copy | None) -> list[BatchPart]:
        """What the keeper lacks."""
        self.sources.take(BatchReport(facts=BatchFacts(), sources=(source_of(self.store, self.batch),)))
        return [part async for part in self.sources.read(asked(copy), keeper="k")]


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.long) for n in range(10, 60))])
async def test_a_take_over_at_any_moment_runs_each_line_exactly_once(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are cut off at any byte, the keeper's machine stops at any write, with torn files behind."""
    rng = random.Random(seed)
    monkeypatch.setattr(sources_module, "PART_BYTES", rng.choice([7, 64, 1 << 18]))
    monkeypatch.setattr(sources_module, "MOST_BYTES", rng.choice([100, 1000, 1 << 24]))
    monkeypatch.setattr(sources_module, "NEWS_S", 0.0)
    owner, folder = Owner(tmp_path / "owner"), tmp_path / "keeper"
    keeper = opened(folder)
    for number in range(rng.randrange(1, 40)):
        owner.works(rng)
        parts = await owner.parts(keeper.copies.find(BATCH))
        if number and parts and rng.random() < 0.3:
            parts = parts[: rng.randrange(1, len(parts) + 1)]
        if parts:
            taken(keeper, parts)
        if rng.random() < 0.2:
            keeper.close()
            for path in folder.glob("copies/*/*put"):
                with path.open("ab") as file:
                    file.write(rng.randbytes(rng.randrange(50)))
            keeper = opened(folder)
    copy = keeper.copies.find(BATCH)
    while copy is None or copy.sizes[0] < copy.input.num_bytes:
        copy = taken(keeper, await owner.parts(copy))
    owner.store.close()

    batch, _ = keeper.take_over(copy, owner="b", now_s=NOW_S + 5)
    keeper.close()
    keeper = opened(folder)
    assert keeper.copies.all() == []
    assert batch == keeper.batch("b", BATCH)
    assert (batch.term, batch.status, batch.owner) == (1, "in_progress", "b")
    rest = unfinished(keeper, batch)
    done = sorted(set(unfinished_of_input(keeper, batch)) - set(rest))
    assert batch.completed + batch.failed == len(done)
    assert batch.usage == sum((answered(number).usage for number in done), TokenUsage())
    ends = [len(answered(number).entry) for number in done]
    assert batch.output_bytes + batch.error_bytes == sum(ends), "nothing that the copy has runs again"
    while rest:
        group = [rest.pop() for _ in range(min(len(rest), rng.randrange(1, 9)))]
        batch = keeper.record(BATCH, [answered(number) for number in group])
    good = recorded(keeper.path_of("file-out"), batch.output_bytes)
    bad = recorded(keeper.path_of("file-err"), batch.error_bytes)
    assert sorted(good + bad) == unfinished_of_input(keeper, batch), "each line has one result"
    assert batch.all_lines_done
    keeper.close()


def unfinished_of_input(store: Store, batch: Batch) -> list[int]:
    """All lines of the input that are not empty."""
    lines = store.path_of(batch.input_file).read_bytes().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line]


@pytest.mark.parametrize("cut", range(0, 900, 61))
async def test_a_copy_cut_at_any_byte_keeps_its_whole_entries(tmp_path: Path, cut: int) -> None:
    owner, keeper = Owner(tmp_path / "owner", num_lines=6), opened(tmp_path / "keeper")
    owner.batch = owner.store.record(BATCH, [answered(number) for number in owner.left])
    entries = [answered(number).entry for number in owner.left if number % 3]
    copy = taken(keeper, await owner.parts(None))
    short = replace(copy, sizes=(copy.sizes[0], min(cut, copy.sizes[1]), copy.sizes[2]))
    keeper.copies.keep(short)
    batch, _ = keeper.take_over(short, owner="a", now_s=NOW_S)
    whole = [size for size in (sum(map(len, entries[:n])) for n in range(len(entries) + 1)) if size <= cut]
    assert (batch.completed, batch.output_bytes) == (len(whole) - 1, whole[-1])
    assert keeper.path_of("file-out").stat().st_size == whole[-1]
    keeper.close()
    owner.store.close()


async def test_a_crash_in_a_take_over_leaves_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, keeper = Owner(tmp_path / "owner"), opened(tmp_path / "keeper")
    owner.works(random.Random(3))
    copy = taken(keeper, await owner.parts(None))

    def fails(_self: TakeOver) -> None:
        raise OSError("the machine stops")

    with monkeypatch.context() as broken:
        broken.setattr(TakeOver, "_link", fails)
        with pytest.raises(OSError, match="stops"):
            keeper.take_over(copy, owner="a", now_s=NOW_S)
    keeper.close()
    keeper = opened(tmp_path / "keeper")
    assert keeper.find(BATCH) is None
    assert keeper.copies.find(BATCH) == copy
    kept = tmp_path / "later"
    shutil.copytree(tmp_path / "keeper" / "copies" / BATCH, kept)
    batch, num_bytes = keeper.take_over(copy, owner="a", now_s=NOW_S)
    assert num_bytes == copy.num_bytes
    keeper.close()
    shutil.copytree(kept, tmp_path / "keeper" / "copies" / BATCH)  # as if it had stopped before the copy was dropped
    keeper = opened(tmp_path / "keeper")
    assert keeper.copies.all() == []
    assert keeper.find(BATCH) == batch
    keeper.close()
    owner.store.close()


async def test_a_batch_that_had_ended_has_its_files_at_the_keeper(tmp_path: Path) -> None:
    owner, keeper = Owner(tmp_path / "owner", num_lines=6), opened(tmp_path / "keeper")
    owner.store.record(BATCH, [answered(number) for number in owner.left])
    done = owner.store.change(BATCH, lambda batch: batch.finalizing("completed", now_s=NOW_S))
    owner.batch = owner.store.finish(done, lambda batch: batch.ended(now_s=NOW_S), now_s=NOW_S)
    copy = taken(keeper, await owner.parts(None))
    batch, _ = keeper.take_over(copy, owner="a", now_s=NOW_S)
    assert (batch.status, batch.completed, batch.failed) == ("completed", owner.batch.completed, owner.batch.failed)
    files = keeper.list_files("a", purpose="", after="", newest_first=False, count=9)
    assert files is not None
    assert sorted(file.file_id for file in files) == ["file-err", "file-in", "file-out"]
    for path in (tmp_path / "keeper").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    keeper.close()
    owner.store.close()


async def test_a_batch_may_come_back_to_its_first_owner(tmp_path: Path) -> None:
    first, second = Owner(tmp_path / "first"), opened(tmp_path / "second")
    first.works(random.Random(5))
    batch, _ = second.take_over(taken(second, await first.parts(None)), owner="a", now_s=NOW_S)
    given_up = first.store.change(BATCH, lambda now: now.handed_over("s", name="second", now_s=NOW_S))
    assert given_up.status == "cancelling"
    ended = first.store.finish(given_up, lambda now: now.ended(now_s=NOW_S), now_s=NOW_S)
    assert (ended.status, ended.wants_copy, ended.errors[0].code) == ("cancelled", False, "taken_over")
    left = unfinished(second, batch)
    batch = second.record(BATCH, [answered(number) for number in left[:9]])
    sources = BatchSources(tmp_path / "second" / "files", local=FakeState())
    sources.take(BatchReport(facts=BatchFacts(), sources=(source_of(second, batch),)))
    copy = taken(first.store, [part async for part in sources.read(asked(None), keeper="k")])
    again, num_bytes = first.store.take_over(copy, owner="a", now_s=NOW_S)
    assert num_bytes == batch.output_bytes + batch.error_bytes, "its input is still here"
    assert (again.term, again.handed_to) == (2, "")
    assert unfinished(first.store, again) == left[9:]
    first.store.close()
    second.close()


async def test_foreign_bytes_and_records_are_refused(tmp_path: Path) -> None:
    owner, keeper = Owner(tmp_path / "owner"), opened(tmp_path / "keeper")
    owner.works(random.Random(1))
    parts = await owner.parts(None)
    copy = taken(keeper, parts[:1])
    for part in (
        BatchPart(file=0, offset=3, data=b"x"),
        BatchPart(file=0, offset=0, data=b"x" * (copy.input.num_bytes + 1)),
    ):
        with pytest.raises(RemoteProtocolError):
            keeper.copies.append(copy, part)
    for record, batch_id in ((parts[0].record, "batch_2"), (b"{}", BATCH), (b"\xff", BATCH), (b"[1]", BATCH)):
        with pytest.raises(RemoteProtocolError):
            keeper.copies.begin(record, batch_id=batch_id, owner_node="o", owner_name="owner", now_s=NOW_S)
    values = json.loads(parts[0].record)
    for kind, field_name, value in (
        ("batch", "output_file", "../../identity"),
        ("batch", "output_file", "file-in"),
        ("batch", "kept_s", "soon"),
        ("batch", "term", -1),
        ("batch", "status", "done"),
        ("batch", "owner", 7),
        ("batch", "surprise", 1),
        ("input", "file_id", "file-other"),
        ("input", "num_bytes", 1e300),
        ("input", "filename", "x" * 5000),
    ):
        wrong = values | {kind: values[kind] | {field_name: value}}
        with pytest.raises(RemoteProtocolError):
            keeper.copies.begin(
                json.dumps(wrong).encode(), batch_id=BATCH, owner_node="o", owner_name="owner", now_s=NOW_S
            )
    moved = keeper.copies.begin(parts[0].record, batch_id=BATCH, owner_node="p", owner_name="other", now_s=NOW_S)
    assert moved.sizes == (0, 0, 0), "another owner's files may differ"
    keeper.close()
    owner.store.close()


@pytest.mark.parametrize("name", ["file-in", "file-out"])
async def test_a_take_over_touches_no_other_file(tmp_path: Path, name: str) -> None:
    owner, keeper = Owner(tmp_path / "owner"), opened(tmp_path / "keeper")
    owner.works(random.Random(1))
    upload = keeper.new_upload(name)
    upload.write(b"private")
    private = StoredFile(
        file_id=name, owner="c", num_bytes=7, created_s=1, expires_s=2, filename="private", purpose="batch"
    )
    keeper.keep(upload, private)
    copy = taken(keeper, await owner.parts(None))
    with pytest.raises(RequestInvalid, match="other files"):
        keeper.take_over(copy, owner="a", now_s=NOW_S)
    assert keeper.path_of(name).read_bytes() == b"private"
    assert keeper.copies.find(BATCH) == copy
    keeper.close()
    owner.store.close()


async def test_only_the_keeper_reads_a_batch(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner")
    await owner.parts(None)

    async def read(keeper: str | None) -> AsyncIterator[BatchPart]:
        async for part in owner.sources.read(asked(None), keeper=keeper):
            yield part

    assert (await anext(read("k"))).record
    with pytest.raises(AccessDenied):
        _ = [part async for part in read("other")]
    owner.sources.take(BatchReport(facts=BatchFacts()))
    with pytest.raises(AccessDenied):
        _ = [part async for part in read("k")]
    owner.store.close()


def node(name: str, facts: BatchFacts | None = None, **fields: Any) -> MemberState:
    """A machine whose id is its name."""
    return MemberState(node=NodeState(node_id=NodeId(name), name=name, batches=facts, **fields), state="alive")


def view(*members: MemberState) -> ClusterView:
    own = MemberState(node=NodeState(node_id=NodeId("me"), name="me"), state="alive", self=True)
    return ClusterView(members=(own, *members))


def owning(term: int = 0, keeper: str = "me") -> BatchFacts:
    return BatchFacts(room_bytes=ROOM, owned=(OwnedBatch(batch_id=BATCH, keeper=keeper, term=term, num_bytes=9),))


def batch_of(**fields: Any) -> Batch:
    wanted: dict[str, Any] = {
        "batch_id": BATCH,
        "owner": "address:127.0.0.1",
        "endpoint": "/v1/completions",
        "input_file": "i",
        "completion_window": "24h",
        "created_s": 0,
        "expires_s": DAY_S,
        "output_file": "o",
        "error_file": "e",
        "kept_s": DAY_S,
        "copies": 2,
    }
    return Batch(**(wanted | fields))


def copy_of(batch: Batch, *, sizes: tuple[int, int, int] = (5, 0, 0), owner: str = "o") -> Copy:
    file = StoredFile(
        file_id="i", owner="x", num_bytes=5, created_s=0, expires_s=9, filename="in.jsonl", purpose="batch"
    )
    return Copy(owner_node=owner, owner_name=owner, batch=batch, input=file, sizes=sizes, updated_s=NOW_S)


names = st.sets(st.sampled_from("abcdefgh"), max_size=6)


@given(machines=names, full=names, silent=names, current=st.sampled_from(["", *"abcdefgh"]))
def test_the_keeper_stays_while_it_is_heard_and_has_room_if_it_is_new(
    machines: set[str], full: set[str], silent: set[str], current: str
) -> None:
    heard = view(
        *(node(name, None if name in silent else BatchFacts(room_bytes=0 if name in full else 10)) for name in machines)
    )
    keeper = copies.choose_keeper(BATCH, current=current, num_bytes=10, view=heard)
    fit = machines - full - silent
    if current in machines or not fit:
        assert keeper == current
    else:
        assert keeper in fit
        without = [name for name in fit if name != keeper]
        for other in without:  # one machine's end moves only its own copies
            rest = view(*(node(name, BatchFacts(room_bytes=10)) for name in fit if name != other))
            assert copies.choose_keeper(BATCH, current="", num_bytes=10, view=rest) == keeper


@given(terms=st.dictionaries(st.sampled_from(["me", *"abcdefgh"]), st.integers(0, 3), min_size=1))
def test_of_all_owners_that_hear_each_other_one_stays(terms: dict[str, int]) -> None:
    stays: list[str] = []
    for own_id, term in terms.items():
        heard = view(*(node(name, owning(other)) for name, other in terms.items() if name != own_id))
        if copies.superseded_by(batch_of(term=term, keepers=tuple(terms)), own_id=own_id, view=heard) is None:
            stays.append(own_id)
    assert len(stays) == 1
    assert terms[stays[0]] == max(terms.values())


def test_a_machine_that_was_never_the_keeper_takes_nothing_over() -> None:
    liar = node("liar", owning(99))
    assert copies.superseded_by(batch_of(keepers=("k",)), own_id="me", view=view(liar)) is None
    copy = copy_of(batch_of(keepers=("me",)))
    heard = view(node("o", owning()), liar)
    assert copies.pulls("me", heard, held=[copy])[BATCH].owner.name == "o"
    away = view(node("liar", owning(99, keeper="liar")))
    assert copies.is_needed(copy, own_id="me", view=away, now_s=NOW_S)
    named = batch_of()
    for number in range(20):
        named = named.kept_by(f"k{number}").kept_by("")
    assert named.keepers == tuple(f"k{number}" for number in range(12, 20))
    assert Batch.from_text(named.to_text()) == named


def test_what_is_pulled_and_what_is_dropped() -> None:
    heard = view(node("o", owning()))
    assert list(copies.pulls("me", heard, held=[])) == [BATCH]
    assert copies.pulls("me", view(node("o", owning(keeper="other"))), held=[]) == {}
    later = copies.pulls("me", view(node("o", owning()), node("p", owning(1))), held=[])
    assert (later[BATCH].owner.name, later[BATCH].term) == ("p", 1)
    assert copies.pulls("me", view(node("o", owning()), node("p", owning(1, keeper="o"))), held=[]) == {}

    def needed(now_s: int, *members: MemberState) -> bool:
        return copies.is_needed(copy_of(batch_of()), own_id="me", view=view(*members), now_s=now_s)

    assert needed(NOW_S, node("o", owning()))
    assert needed(NOW_S), "its owner is away"
    assert needed(NOW_S, node("o")), "its owner has not reported yet"
    assert not needed(NOW_S + DAY_S), "its time is over"
    assert not needed(NOW_S, node("o", BatchFacts())), "its owner has forgotten the batch"
    assert not needed(NOW_S, node("o", owning(keeper="p"))), "another machine keeps it"


def test_a_batch_of_an_earlier_gateway_waits_for_its_keeper() -> None:
    batch = batch_of(keeper="k")
    assert not copies.may_run(batch, view=view(), waited=False)
    assert not copies.may_run(batch, view=view(node("k")), waited=False)
    assert copies.may_run(batch, view=view(node("k", BatchFacts())), waited=False)
    assert copies.may_run(batch, view=view(), waited=True)
    assert copies.may_run(batch_of(), view=view(), waited=False)
    assert copies.may_run(batch_of(copies=1, keeper="k"), view=view(), waited=False)


def test_a_take_over_is_refused_with_the_reason() -> None:
    copy = copy_of(batch_of())

    def why(
        *members: MemberState, copy: Copy | None = copy, owns: bool = False, listened: bool = True
    ) -> tuple[str, str]:
        found = copies.refusal(BATCH, copy, owns=owns, listened=listened, view=view(*members))
        return ("", "") if found is None else (found.fact, found.next_step)

    assert why() == ("", "")
    assert why(node("p", BatchFacts())) == ("", "")
    assert why(owns=True)[1] == f"edgepipe batch show {BATCH}"
    assert why(node("o")) == ("machine o answers", f"on o: edgepipe batch show {BATCH}")
    assert why(node("p", owning(1)))[0] == "machine p answers"
    assert "few seconds" in why(listened=False)[0]
    assert why(node("p", BatchFacts(owners=("o",))))[0] == "machine p hears it, this one does not"
    assert "of the 5" in why(copy=copy_of(batch_of(), sizes=(2, 0, 0)))[0]
    holder = node("p", BatchFacts(held=(HeldBatch(batch_id=BATCH, owner="o"),)))
    assert why(holder, copy=None) == ("machine p does", f"on p: edgepipe batch take-over {BATCH}")
    assert why(copy=None)[0] == "1 machines were asked"


@pytest.mark.parametrize(
    ("status", "ends_as", "done", "wanted"),
    [
        ("validating", "completed", 0, "validating"),
        ("in_progress", "completed", 3, "in_progress"),
        ("cancelling", "completed", 3, "cancelling"),
        ("finalizing", "completed", 9, "finalizing"),
        ("finalizing", "completed", 8, "in_progress"),
        ("completed", "completed", 9, "completed"),
        ("completed", "completed", 8, "in_progress"),
        ("expired", "expired", 8, "finalizing"),
        ("expired", "expired", 9, "expired"),
        ("cancelled", "completed", 2, "cancelled"),
        ("failed", "completed", 0, "failed"),
    ],
)
@pytest.mark.parametrize("failing", [0, 3])
def test_the_status_after_a_take_over(status: Any, ends_as: Any, done: int, wanted: str, failing: int) -> None:
    """``failing``: so many of the first lines failed, which are results, too."""
    known = 9 if done > 3 else done
    failed, copied = min(failing, known), min(failing, done)
    batch = batch_of(status=status, ends_as=ends_as, num_lines=9, completed=known - failed, failed=failed)
    tally = copies.Tally(completed=done - copied, failed=copied, usage=TokenUsage(), output_bytes=done)
    resumed = copies.resumed(copy_of(batch), tally, now_s=NOW_S)
    assert (resumed.status, resumed.completed, resumed.failed) == (wanted, done - copied, copied)


def test_where_the_copy_is_said_to_be() -> None:
    batch = batch_of(keeper="k")
    held = BatchFacts(held=(HeldBatch(batch_id=BATCH, owner="me", num_bytes=3000),))
    assert copies.copy_text(batch_of(copies=1), num_bytes=9, view=view()) == ""
    text = "no other machine holds a copy: no other machine is in the cluster"
    assert copies.copy_text(batch_of(), num_bytes=9, view=view()) == text
    assert copies.copy_text(batch, num_bytes=3000, view=view(node("k", held))) == "machine k holds a copy"
    assert copies.copy_text(batch, num_bytes=5000, view=view(node("k", held))).endswith(" behind")
    assert "does not answer" in copies.copy_text(batch, num_bytes=9, view=view())
    assert "begins" in copies.copy_text(batch, num_bytes=9, view=view(node("k")))


def test_who_may_take_over_and_who_sees_the_batch() -> None:
    home = local_users(AccessRules())
    assert home.may_take("address:127.0.0.1", batch_of(owner="elsewhere"))
    assert home.owner_here(batch_of(owner="elsewhere"), "address:127.0.0.1") == "address:127.0.0.1"
    keyed = local_users(AccessRules.of(keys=("first-key", "second-key"), key_on_loopback=True))
    second = next(owner for owner in keyed.known if owner != keyed.machine)
    assert keyed.may_take(keyed.machine, batch_of())
    assert keyed.may_take(second, batch_of(owner=second))
    assert not keyed.may_take(second, batch_of(owner=keyed.machine))
    assert not keyed.may_take("address:127.0.0.1", batch_of(owner=second))
    assert keyed.owner_here(batch_of(owner=second), keyed.machine) == second, "the same key sees it"
    assert keyed.owner_here(batch_of(), keyed.machine) == keyed.machine, "no client without a key is let in here"


def test_at_most_so_many_batches_have_copies() -> None:
    many = [batch_of(batch_id=f"batch_{number}", created_s=number) for number in range(100)]
    many[3] = many[3].handed_over("x", name="x", now_s=1).ended(now_s=2)
    chosen = copies.first_to_copy(many)
    assert len(chosen) == copies.MOST_COPIES
    assert chosen[0].batch_id == "batch_99"
    assert "batch_3" not in {batch.batch_id for batch in chosen}
